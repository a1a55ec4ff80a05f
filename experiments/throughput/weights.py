"""How fast do weights get from the learner to an actor? Beside memcpy and raw ZeroMQ, in turns, on one machine.

- seal:     a learner's set is copied into memory that others map, with digests; beside copying one array in as many threads
- adopt:    an actor maps a set and copies the tensors into its own; beside that copy
- shared:   from the learner's `publish` to adopted, through a hub, all three processes on one host; beside that copy
- tcp:      an actor fetches the chunks of a set from a hub over loopback; beside PUSH/PULL of frames of the same size
- delta:    from `publish` to adopted over loopback tcp with 2 % of the elements changed; beside the same without deltas
- device:   from the learner's copy to what an engine may adopt, with digests on both sides; beside a broadcast by gloo alone

And what does a publication cost those who have other work?

- beside generation: a learner publishes to an actor that decodes. How long from its call to adopted, beside copying the set as
  often as it must be (out of the learner, into the engine); how long the learner stands still, while it copies the set as in a
  run; how long the actor does, beyond the engine's own copy. Decoding is a matrix product of some 20 ms, on one thread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic, perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.device.ends import EngineEnd
from async_rlhf.buffers.device.group import GlooGroup, open_store, reach_store
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.assembly import mapped
from async_rlhf.buffers.weights.digests import in_threads, num_threads
from async_rlhf.buffers.weights.shared import SealedPool, attach
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet
from async_rlhf.experiments.throughput import weight_roles
from async_rlhf.experiments.throughput.harness import (
    SPAWN,
    Bench,
    BenchmarkRow,
    alternate,
    beside,
    cpu_s,
    raw_seconds,
    running,
    talking,
    timed,
)
from async_rlhf.experiments.throughput.weight_roles import DEADLINE_S, as_tensors, make_words, weights_config
from async_rlhf.launch.sockets import LOOPBACK, free_port

Arrays = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]
_WIDTH = 1024  # of the product that stands for a decode step


def weights(bench: Bench) -> Iterator[BenchmarkRow]:
    """Measure how fast weights travel, beside memcpy and raw ZeroMQ, in GB/s."""
    torch.set_num_threads(1)
    turns, num_bytes = bench.num_turns(5), bench.size(1024, 16) << 20

    def row(load: str, at_least: float | None, **sides: Callable[[], float]) -> BenchmarkRow:
        return beside(load, sides, turns, "GB/s", num_bytes / 1e9, at_least=at_least, figures={"set_mb": num_bytes / 1e6})

    copy = partial(memcpy_seconds, num_bytes)
    seal = partial(WeightSet.of, 1, 1, as_tensors(make_words(num_bytes)), make=SealedPool().make)
    yield row("seal", 0.7, ours=timed(seal), memcpy=copy)
    held, arrays = seal(), dict[str, Any]()
    yield row("adopt", 0.3, ours=partial(adopt_seconds, held, arrays), memcpy=copy)
    del held, arrays, seal
    with WeightFleet.of("ipc", "auto", num_bytes) as fleet:
        yield row("shared", 0.1, ours=lambda: fleet.publish().total, memcpy=copy)
    with WeightFleet.of("tcp", "chunks", num_bytes) as fleet:
        raw = partial(raw_seconds, f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", CHUNK_BYTES, num_bytes // CHUNK_BYTES, 1)
        yield row("tcp", 0.5, ours=lambda: fleet.publish().from_hub, raw=raw)
        with WeightFleet.of("tcp", "delta", num_bytes) as with_deltas:
            for _ in range(2):
                with_deltas.publish()  # the first comes whole, the second tells the learner that deltas are of use
            yield row("delta", None, ours=lambda: with_deltas.publish().total, whole=lambda: fleet.publish().total)
    with WeightFleet.of("ipc", "device", num_bytes) as fleet, raw_broadcast(num_bytes) as gloo:
        for _ in range(2):
            fleet.publish()  # the first goes by the hub, for the actor comes late; the second makes the group
        yield row("device", 0.7, ours=lambda: fleet.publish().from_copy, raw=gloo)


def copy_into(arrays: Arrays, tensors: Mapping[str, RawTensor]) -> None:
    """Copy every tensor, as an engine that copies does, into memory that is there already."""
    data = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in tensors.items()}
    for name in data.keys() - arrays.keys():
        arrays[name] = np.ones_like(data[name])
    in_threads(lambda name: np.copyto(arrays[name], data[name]), data, num_threads())


def memcpy_seconds(num_bytes: int) -> float:
    """One copy between two arrays that are in memory already, in as many threads as a set is copied in."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return timed(lambda: weight_roles.copy(target, source))()


def adopt_seconds(weights: WeightSet, arrays: Arrays) -> float:
    began = perf_counter()
    announced = weights.manifest()
    memory = attach(announced.places, announced.num_bytes)
    assert memory is not None
    copy_into(arrays, mapped(announced, memory).tensors())
    return perf_counter() - began


@contextmanager
def raw_broadcast(num_bytes: int) -> Iterator[Callable[[], float]]:
    """Seconds of one broadcast by gloo from another process to this one, into memory that is there."""
    with talking(_broadcast, num_bytes) as pipe:
        flat = torch.ones(num_bytes, dtype=torch.uint8)
        group = GlooGroup(reach_store(pipe.recv(), DEADLINE_S), "raw", 1, 2, DEADLINE_S)

        def receive() -> None:
            pipe.send("go")
            group.broadcast(flat).wait()

        yield timed(receive)


def _broadcast(num_bytes: int, pipe: Connection) -> None:
    flat, (store, address) = torch.ones(num_bytes, dtype=torch.uint8), open_store(DEADLINE_S)
    pipe.send(address)
    group = GlooGroup(store, "raw", 0, 2, DEADLINE_S)
    while True:
        pipe.recv()
        group.broadcast(flat).wait()


class PublishTimes(NamedTuple):
    """Seconds: from the learner's call, from the hub's word that the set is there, and from the copy that is sent, to adopted
    (the last: to what may be); for which the learner was kept; for which the actor looked after messages; of the engine's own
    copy; of processor time that learner, hub and actor took for all of it."""

    total: float
    from_hub: float
    from_copy: float
    blocked: float
    looked: float
    reload: float
    cpu: float


def nothing() -> None:
    """The work of an idle actor between two looks."""


class WeightFleet:
    """A hub, a learner and, in this process, an actor. pipe: the learner's end of a pipe; hub: its process."""

    def __init__(self, address: str, transport: str, hub: int | None, pipe: Connection) -> None:
        self._pipe, self._hub, self._arrays = pipe, psutil.Process(hub), dict[str, Any]()
        config = weights_config(transport)
        take_seat = EngineEnd(DEADLINE_S) if transport == "device" else None
        self._client = ActorClient(address, "actor", beat_s=1.0, timeout_s=DEADLINE_S, weights=config, take_seat=take_seat)
        self._state = ActorState(0, 0, -1, ())

    @classmethod
    @contextmanager
    def of(cls, scheme: str, transport: str, num_bytes: int) -> Iterator[WeightFleet]:
        with tempfile.TemporaryDirectory() as folder:
            address = f"ipc://{folder}/hub" if scheme == "ipc" else f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}"
            hub = SPAWN.Process(target=weight_roles.hub, args=(address, folder, transport), daemon=True)
            with running(hub), talking(weight_roles.learner, address, transport, num_bytes) as learner:
                fleet = cls(address, transport, hub.pid, learner)
                try:
                    yield fleet
                    with control(address) as operator:
                        operator.halt()
                finally:
                    fleet._client.close()

    def publish(self, meanwhile: Callable[[], object] = nothing) -> PublishTimes:
        """One set, from the learner's call to adopted. meanwhile: what the actor does between two looks."""
        self._pipe.send("publish")
        fence, looked_s, spent_s, weights = self._state.fence, 0.0, -cpu_s(self._hub), None
        while weights is None or weights.fence == fence:
            meanwhile()
            began, working = monotonic(), thread_time()
            self._client.poll(self._state, wire.Telemetry(), timeout_s=0.0 if meanwhile is not nothing else 0.01)
            looked_s += monotonic() - began
            spent_s += thread_time() - working
            weights = self._client.weights()
        here, working = monotonic(), thread_time()
        copy_into(self._arrays, weights.tensors())
        adopted = monotonic()
        spent_s += thread_time() - working + cpu_s(self._hub)
        _, began, copied, sent_from, ended, learner_s = self._pipe.recv()
        self._state = ActorState(0, weights.fence, weights.version, ())
        self._client.beat(self._state, wire.Telemetry())
        return PublishTimes(
            adopted - began, adopted - ended, here - sent_from, copied - began, looked_s, adopted - here, spent_s + learner_s
        )


def publication(bench: Bench) -> Iterator[BenchmarkRow]:
    """Measure what a publication costs learner and generation."""
    torch.set_num_threads(1)
    yield beside_generation(bench.num_turns(3), bench.size(2048, 16) << 20)


def beside_generation(turns: int, num_bytes: int) -> BenchmarkRow:
    published = list[PublishTimes]()
    matrix = torch.ones(_WIDTH, _WIDTH)
    with WeightFleet.of("ipc", "auto", num_bytes) as fleet:

        def ours() -> float:
            published.append(fleet.publish(lambda: torch.mm(matrix, matrix)))
            return published[-1].total

        seconds = alternate({"ours": ours, "copies": lambda: 2 * memcpy_seconds(num_bytes)}, turns)
    _, _, _, *costs = map(statistics.median, zip(*published[-turns:], strict=True))
    names = ("learner_blocked_s", "generation_stopped_s", "reload_s", "cpu_s")
    figures = {"set_mb": num_bytes / 1e6, **dict(zip(names, costs, strict=True))}
    return BenchmarkRow.of("beside generation", seconds, "s", at_most=3.0, figures=figures)
