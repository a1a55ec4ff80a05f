"""How fast do weights get from the learner to an actor? Beside memcpy and raw ZeroMQ, in turns, on one machine.

- adopt:    an actor maps a set and copies the tensors into its own; beside copying one array
- shared:   from the learner's `publish` to adopted, through a hub, all three processes on one host; beside that copy
- tcp:      an actor fetches the chunks of a set from a hub over loopback; beside PUSH/PULL of frames of the same size
- delta:    from `publish` to adopted over loopback tcp with 2 % of the elements changed; beside the same without deltas
- versions: deltas between consecutive versions of the shipped model, trained in float32 and published in bfloat16
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter, thread_time
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer
import zmq
from transformers import AutoModelForCausalLM

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.assembly import Assembly, mapped
from async_rlhf.buffers.weights.shared import SealedMemory, attach
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate, cpu_s, rates, timed
from async_rlhf.experiments.throughput.trl import MODEL, ROOT
from async_rlhf.experiments.throughput.weight_roles import DEADLINE_S, as_tensors, make_words, weights_config
from async_rlhf.launch.network import LOOPBACK, free_port

Arrays = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]
Megabytes = Annotated[int, typer.Option("--megabytes", min=1, help="Size of the set, in MiB.")]


def weights(bench: Bench, megabytes: Megabytes = 1024) -> Iterator[Row]:
    """Measure how fast weights travel, beside memcpy and raw ZeroMQ, in GB/s."""
    torch.set_num_threads(1)
    turns, num_bytes = bench.num_turns(5), bench.size(megabytes, 16) << 20

    def beside(load: str, at_least: float | None, **sides: Callable[[], float]) -> Row:
        speed = rates(num_bytes / 1e9, alternate(sides, turns))
        return Row.of(load, speed, "GB/s", at_least=at_least, figures={"set_mb": num_bytes / 1e6})

    copy = partial(memcpy_seconds, num_bytes)
    held, arrays = WeightSet.of(1, 1, as_tensors(make_words(num_bytes)), make=SealedMemory.make), dict[str, Any]()
    yield beside("adopt", 0.3, ours=partial(adopt_seconds, held, arrays), memcpy=copy)
    del held, arrays
    with Fleet.of("ipc", "auto", num_bytes) as fleet:
        yield beside("shared", 0.1, ours=lambda: fleet.publish().total, memcpy=copy)
    with Fleet.of("tcp", "chunks", num_bytes) as fleet:
        raw = iter(raw_seconds(num_bytes, turns + 1))
        yield beside("tcp", 0.5, ours=lambda: fleet.publish().from_hub, raw=lambda: next(raw))
        with Fleet.of("tcp", "delta", num_bytes) as with_deltas:
            for _ in range(2):
                with_deltas.publish()  # the first comes whole, the second tells the learner that deltas are of use
            yield beside("delta", None, ours=lambda: with_deltas.publish().total, whole=lambda: fleet.publish().total)
    for learning_rate in (1e-4, 1e-5, 1e-6):
        yield measure_versions(learning_rate, turns)


def copy_into(arrays: Arrays, tensors: Mapping[str, RawTensor]) -> None:
    """What an engine does with a set: every tensor into memory that is there already."""
    for name, tensor in tensors.items():
        data = np.frombuffer(tensor.data, np.uint8)
        if name not in arrays:
            arrays[name] = np.ones_like(data)
        np.copyto(arrays[name], data)


def memcpy_seconds(num_bytes: int) -> float:
    """One copy between two arrays that are in memory already."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    began = perf_counter()
    np.copyto(target, source)
    return perf_counter() - began


def adopt_seconds(weights: WeightSet, arrays: Arrays) -> float:
    began = perf_counter()
    announced = weights.manifest()
    assert announced.place is not None
    memory = attach(announced.place, announced.num_bytes)
    assert memory is not None
    copy_into(arrays, mapped(announced, memory).tensors())
    return perf_counter() - began


@contextmanager
def process(*arguments: str | int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput.weight_roles", *map(str, arguments)]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@dataclass(frozen=True)
class Published:
    """Seconds: from the learner's call, and from the hub's word that the set is there, to adopted; for which the learner was
    kept; for which the actor looked after messages; of the engine's own copy; of processor time that learner, hub and actor
    took for all of it."""

    total: float
    from_hub: float
    blocked: float
    looked: float
    reload: float
    cpu: float


def nothing() -> None:
    """What an idle actor does between two looks."""


class Fleet:
    """A hub, a learner and, in this process, an actor."""

    def __init__(self, address: str, transport: str, hub: subprocess.Popen[str], learner: subprocess.Popen[str]) -> None:
        self._learner, self._arrays = learner, dict[str, Any]()
        self._hub = psutil.Process(hub.pid)
        config = weights_config(transport)
        self._client = ActorClient(address, "actor", beat_s=1.0, timeout_s=DEADLINE_S, weights=config)
        self._state = ActorState(0, 0, -1, ())

    @classmethod
    @contextmanager
    def of(cls, scheme: str, transport: str, num_bytes: int) -> Iterator[Fleet]:
        with tempfile.TemporaryDirectory() as folder:
            address = f"ipc://{folder}/hub" if scheme == "ipc" else f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}"
            with (
                process("hub", address, folder, transport) as hub,
                process("learner", address, transport, num_bytes) as learner,
            ):
                fleet = cls(address, transport, hub, learner)
                try:
                    yield fleet
                    with control(address) as operator:
                        operator.halt()
                finally:
                    fleet._client.close()

    def publish(self, meanwhile: Callable[[], object] = nothing) -> Published:
        """One set, from the learner's call to adopted. meanwhile: what the actor does between two looks."""
        assert self._learner.stdin is not None and self._learner.stdout is not None
        self._learner.stdin.write("publish\n")
        self._learner.stdin.flush()
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
        _, began, copied, ended, learner_s = map(float, self._learner.stdout.readline().split())
        self._state = ActorState(0, weights.fence, weights.version, ())
        self._client.beat(self._state, wire.Telemetry())
        return Published(adopted - began, adopted - ended, copied - began, looked_s, adopted - here, spent_s + learner_s)


def raw_seconds(num_bytes: int, repeats: int) -> list[float]:
    """PUSH/PULL of the same bytes in frames as large as a chunk over loopback tcp, without looking at them."""
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.RCVHWM, 16)
    pull.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    address, seconds = f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", []
    pull.bind(address)
    with process("source", address, num_bytes, CHUNK_BYTES) as child:
        assert child.stdin is not None
        for _ in range(repeats):
            child.stdin.write("push\n")
            child.stdin.flush()
            pull.poll(int(DEADLINE_S * 1000))
            began = perf_counter()
            for _ in range(num_bytes // CHUNK_BYTES):
                pull.recv()
            seconds.append(perf_counter() - began)
    context.destroy(linger=0)
    return seconds


def versions(learning_rate: float, steps: int) -> list[WeightSet]:
    """Consecutive bfloat16 versions of the shipped model, trained in float32 on random texts."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    sets = []
    for step in range(steps):
        ids = torch.randint(3, 30, (16, 40))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        tensors = {
            name: RawTensor("bfloat16", tuple(p.shape), p.detach().bfloat16().reshape(-1).view(torch.uint8).numpy().data)
            for name, p in model.named_parameters()
        }
        sets.append(WeightSet.of(1, step, tensors))
    return sets


def measure_versions(learning_rate: float, turns: int) -> Row:
    """The last step's delta: its share of the set's bytes; GB of the set encoded, and applied and verified, a second."""
    old, new = versions(learning_rate, steps=8)[-2:]
    before, after = (np.frombuffer(each.blob, "<u2") for each in (old, new))
    data = delta.encode(memoryview(old.blob), memoryview(new.blob), new.specs, len(new.blob))
    assert data is not None

    def apply() -> None:
        assembly = Assembly(new.announcement())
        assembly.patch(old, [data])
        assert assembly.whole() == new

    encode = timed(lambda: delta.encode(memoryview(old.blob), memoryview(new.blob), new.specs, len(new.blob)))
    seconds = alternate({"encode": encode, "apply": timed(apply)}, turns)
    speed = {f"{name}_gb_per_s": statistics.median(v) for name, v in rates(len(new.blob) / 1e9, seconds).items()}
    sizes, changed = {"delta": [len(data)], "set": [len(new.blob)]}, float((before != after).mean())
    return Row.of(
        f"versions, learning rate {learning_rate:.0e}", sizes, "bytes", counted=True, figures={"changed": changed, **speed}
    )
