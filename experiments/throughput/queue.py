"""How fast is the replay queue next to raw pyzmq? Both in turns on one machine, with the same number and size of messages.

A message is a group of 8 rollouts. Four producers, one hub, one consumer, each a process; everything over ipc.

- raw: PUSH to PULL, no hub, nothing checked, nothing kept.
- queue: the real hub. Producers speak the actor's protocol (hello, credits, put, ack) and the consumer is a learner that takes,
  trains on nothing, and commits every 16 batches. So every byte goes to the hub, to the journal, from the journal and to the
  learner, and is checked twice. Producers send what was packed before with another number, and the consumer does not unpack.

Also: the time from put to take at 10,000 rollouts a second, the processor time of the hub, and what 64 clients cost it beside
two: while they put, and while there is nothing to do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import psutil
import zmq

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import Fsync, QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import SocketLink
from async_rlhf.experiments.throughput.harness import SPAWN, Bench, BenchmarkRow, alternate, cpu_s, raw_seconds, running

GROUP_SIZE, PRODUCERS = 8, 4
_CROWD = 64
COMMIT_EVERY = 16
_GOALS = {("2 KB", "off"): 0.1, ("64 KB", "off"): 0.3}
_MAX_STALENESS = 1024  # nothing is published while it is measured, so all of it is sampled by version 0


@dataclass(frozen=True)
class QueueLoad:
    """num_groups groups of rollouts of so many bytes, in batches of `batch` groups; rate: groups/s in all, 0: all they can.
    clients: of the hub that put them, in at most `PRODUCERS` processes."""

    name: str
    rollout_bytes: int
    fsync: Fsync
    num_groups: int
    batch: int = 32
    rate: float = 0.0
    clients: int = PRODUCERS


def queue(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare the replay queue with raw pyzmq, in MB/s of groups (10^6 bytes of ids and log-probabilities)."""
    scale = bench.size(1, 64)
    small, large = (QueueLoad("2 KB", 2048, "off", 16384 // scale), QueueLoad("64 KB", 65536, "off", 2048 // scale))
    all_loads = [small, replace(small, fsync="group"), large, replace(large, fsync="group")]
    for load in bench.size(all_loads, all_loads[1:3]):
        yield measure(load, bench.num_turns(3))
    waits = sorted(run_queue(QueueLoad("2 KB", 2048, "group", 4096 // scale, batch=4, rate=1250.0)).wait_ms)
    p99 = {"p99_ms": waits[int(0.99 * len(waits))]}
    yield replace(BenchmarkRow.of("put to take at 10,000 rollouts a second", {"wait": waits}, "ms", figures=p99), turns=1)
    yield crowd(replace(small, num_groups=small.num_groups // 2), bench.num_turns(3), bench.size(10.0, 1.0))


def measure(load: QueueLoad, turns: int) -> BenchmarkRow:
    """Raw and queue in turns, none to warm up: each starts processes of its own."""
    size, cpu = load.rollout_bytes * GROUP_SIZE * load.num_groups / 1e6, list[float]()

    def through_the_hub() -> float:
        run = run_queue(load)
        cpu.append(1000 * run.hub_cpu_s / (load.num_groups * GROUP_SIZE))
        return size / run.seconds

    rates = alternate({"queue": through_the_hub, "raw": lambda: size / run_raw(load)}, turns, warm_up=0)
    per_s = round(statistics.median(rates["queue"]) * 1e6 / load.rollout_bytes)
    figures, goal = {"rollouts_per_s": per_s, "hub_cpu_s_per_1000": statistics.median(cpu)}, _GOALS.get((load.name, load.fsync))
    return BenchmarkRow.of(f"{load.name} a rollout, fsync {load.fsync}", rates, "MB/s", at_least=goal, figures=figures)


def crowd(load: QueueLoad, turns: int, idle_s: float) -> BenchmarkRow:
    """The hub with many clients beside the hub with two."""
    cpu: dict[int, list[float]] = {_CROWD: [], 2: []}

    def with_clients(number: int) -> float:
        run, rollouts = run_queue(replace(load, clients=number)), GROUP_SIZE * load.num_groups
        cpu[number].append(1000 * run.hub_cpu_s / rollouts)
        return rollouts / run.seconds

    rates = alternate({f"{number} clients": partial(with_clients, number) for number in cpu}, turns, warm_up=0)
    figures = {f"hub_cpu_of_{number}_s_per_1000": statistics.median(values) for number, values in cpu.items()}
    figures["idle_percent"] = idle_percent(replace(load, clients=_CROWD), idle_s)
    return BenchmarkRow.of(f"{_CROWD} clients beside 2", rates, "rollouts/s", at_least=0.8, figures=figures)


def idle_percent(load: QueueLoad, seconds: float) -> float:
    """Processor time of the hub in percent of a core, while all clients are connected and there is nothing for them to do."""
    bound = Bound(load.batch, _MAX_STALENESS, load.batch)
    with _hub(load, bound) as (address, hub, learner), running(*_producers(load, address)), control(address) as asking:
        learner.take_packed(0)
        while len(asking.status()["actors"]) < load.clients:
            time.sleep(0.1)
        process, began = psutil.Process(hub.pid), time.perf_counter()
        before_s = cpu_s(process)
        time.sleep(seconds)
        return 100 * (cpu_s(process) - before_s) / (time.perf_counter() - began)


class QueueRun(NamedTuple):
    """One run through the hub. wait_ms: from put until the batch has come, of groups after the first quarter."""

    seconds: float
    hub_cpu_s: float
    wait_ms: Sequence[float]


def a_group(rollout_bytes: int) -> Group:
    """Eight completions that take so many bytes each: int32 ids and float32 log-probabilities."""
    num_tokens = rollout_bytes // 8
    ids, logprobs = np.arange(num_tokens, dtype=np.int32), np.full(num_tokens, -0.5, np.float32)
    timings = {"put_s": 0.0, "generate_s": 1.5}
    rollouts = tuple(
        Rollout(ids, logprobs, (Span(0, num_tokens),), "length", {"right": Score(float(i % 2))}, timings=timings)
        for i in range(GROUP_SIZE)
    )
    return Group(0, 0, np.arange(32, dtype=np.int32), rollouts, Sampling(), "producer-0", "a prompt", {"answer": "42"})


def run_raw(load: QueueLoad) -> float:
    """Seconds of as many messages of the same size."""
    header, arrays = packing.pack_group(a_group(load.rollout_bytes))
    size = sum(map(len, wire.encode(wire.Put(group=header), arrays)))
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        return raw_seconds(f"ipc://{folder}/raw", size, load.num_groups, PRODUCERS)


def run_queue(load: QueueLoad) -> QueueRun:
    """All groups through the hub, from the first batch to the last."""
    bound = Bound(load.batch, _MAX_STALENESS, load.num_groups)
    with _hub(load, bound) as (address, hub, learner), running(*_producers(load, address)):
        process, num_batches, wait_ms = psutil.Process(hub.pid), load.num_groups // load.batch, list[float]()
        learner.take_packed(0)  # all producers have started
        began, before_s = time.perf_counter(), cpu_s(process)
        for step in range(num_batches):
            frames = learner.take_packed(step)
            assert not isinstance(frames, str), frames
            if load.rate and step >= num_batches // 4:
                now = time.monotonic()
                wait_ms += [1e3 * (now - _put_at(frame)) for frame in frames[::3]]
            learner.trained(step)
            if (step + 1) % COMMIT_EVERY == 0:
                learner.commit(step + 1)
        return QueueRun(time.perf_counter() - began, cpu_s(process) - before_s, wait_ms)


@contextmanager
def _hub(load: QueueLoad, bound: Bound) -> Iterator[tuple[str, BaseProcess, LearnerClient]]:
    """A hub in a process of its own, and a learner that has published version 0."""
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        address = f"ipc://{folder}/hub"
        process = SPAWN.Process(target=_serve, args=(address, folder, load.fsync, bound), daemon=True)
        with running(process):
            learner = LearnerClient(address, timeout_s=60.0)
            learner.register(0, 0)
            learner.publish(0, {"w": RawTensor("float32", (), bytes(4))})
            yield address, process, learner
            learner.close()


def _serve(address: str, folder: str, fsync: Fsync, bound: Bound) -> None:
    Hub(address, Path(folder), QueueConfig(max_staleness=bound.max_staleness, fsync=fsync), bound).run()


def _producers(load: QueueLoad, address: str) -> list[BaseProcess]:
    header, arrays = packing.pack_group(a_group(load.rollout_bytes))
    arguments = (address, header.model_dump(), arrays, load.rate / load.clients)
    names = [f"producer-{number}" for number in range(load.clients)]
    parts = [names[begin::PRODUCERS] for begin in range(min(PRODUCERS, load.clients))]
    return [SPAWN.Process(target=produce, args=(part, *arguments), daemon=True) for part in parts]


def _put_at(header: bytes) -> float:
    _, message, _ = wire.decode([header], max_frame_bytes=wire.MAX_FRAME_BYTES)
    assert isinstance(message, wire.Put)
    return message.group.timings[0]["put_s"]


_CAPACITY = 64
_BEAT_S = 1.0


def produce(names: Sequence[str], address: str, group: dict[str, Any], arrays: list[bytes], rate: float) -> None:
    """Clients in one process, until it is killed: each puts a group for every credit, at most `rate` a second but for 0."""
    clients, poller = [_BareActor(name, address, rate) for name in names], zmq.Poller()
    for waited_for in (each for client in clients for each in client.link.sockets):
        poller.register(waited_for, zmq.POLLIN)
    while True:
        wait_s = min(client.turn(group, arrays) for client in clients)
        poller.poll(int(1000 * wait_s))


class _BareActor:
    """Speaks the actor's protocol: hello, beats, credits, puts."""

    def __init__(self, name: str, address: str, rate: float) -> None:
        self.link, self._rate, self._credits = SocketLink(address, name), rate, deque[tuple[int, int]]()
        self._fence, self._version, self._beat_at, self._due = 0, -1, 0.0, time.monotonic()
        self.link.send(wire.encode(wire.Hello(actor=name, life=name, capacity=_CAPACITY, fence=0, version=-1), request=1))

    def turn(self, group: dict[str, Any], arrays: list[bytes]) -> float:
        """Everything that can be done now; seconds until there is more to do."""
        while (frames := self.link.receive(0.0)) is not None:
            message = msgpack.unpackb(frames[0])[2]
            if message["type"] == "credits":
                self._credits += [(credit["number"], credit["attempt"]) for credit in message["credits"]]
            elif message["type"] == "adopt":
                self._fence, self._version, self._beat_at = message["fence"], message["version"], 0.0
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_S
            self.link.send(wire.encode(wire.Beat(capacity=_CAPACITY, fence=self._fence, version=self._version), request=2))
        while self._credits and (not self._rate or now >= self._due):
            self._due = max(self._due + 1 / self._rate, now - 0.1) if self._rate else now
            self.link.send([put_header(group, *self._credits.popleft(), time.monotonic()), *arrays])
        return max(0.0, min(self._beat_at, self._due if self._credits else self._beat_at) - now)


def put_header(group: dict[str, Any], number: int, attempt: int, put_s: float) -> bytes:
    """The header of a Put of this group under another number, packed without a check of what is known to be right."""
    timings = [{"put_s": put_s, "generate_s": 1.5}] * len(group["timings"])
    put = {"type": "put", "group": {**group, "number": number, "attempt": attempt, "timings": timings}}
    return bytes(msgpack.packb([wire.PROTOCOL, number + 10, put]))
