"""A live hub in a process of its own, an honest actor and learner who go on training, and strangers who send it rubbish."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import zmq

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import SocketLink
from tests.buffers.hub.place import Actor, shout
from tests.fuzz.mutants import FENCE, MAX_FRAME_BYTES, at_the_bounds, mutants

_STRANGERS = 4
_DEADLINE_S = 60.0
_LAST = 1 << 40  # number of the question that a stranger ends with
_GREETINGS = (
    b"",
    b"\x01\x00",
    b"\x01\x00\x05\x00",
    *(b"\xff" + bytes(8) + rest for rest in (b"\x7f\x03\x00NULL", b"\x7f\x01\x05")),
)
_BOUND = Bound(groups_per_batch=1, max_staleness=1, num_groups=1 << 40)


@dataclass(frozen=True)
class Report:
    """growth_mib: of the hub's resident memory since the first tenth of the frames. steps: the honest learner's."""

    frames: int
    seconds: float
    answers: int
    growth_mib: float
    steps: int
    status: dict[str, Any]


def run(num_frames: int, seed: int, progress: Callable[[int], None] = lambda sent: None) -> Report:
    """Raises what an honest peer raises, or AssertionError when the hub has died or does not answer."""
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        address = f"ipc://{folder}/hub"
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(address, folder), daemon=True)
        process.start()
        honest = Honest(address)
        try:
            honest.start()
            hub = psutil.Process(process.pid)
            began, before, answers = time.monotonic(), 0, 0
            with _Strangers(address, seed) as strangers:
                for sent, frames in enumerate(itertools.islice(itertools.chain(at_the_bounds(), mutants(seed)), num_frames)):
                    answers += strangers.send(frames)
                    if sent == num_frames // 10:
                        before = hub.memory_info().rss
                    if sent % 100 == 0:
                        strangers.shout()
                    if sent % 1000 == 0:
                        assert process.is_alive(), f"the hub died within the {sent} frames before"
                        honest.check()
                        progress(sent)
                strangers.finish()
                after = hub.memory_info().rss
            with control(address, timeout_s=_DEADLINE_S) as operator:
                status = operator.status()
            assert not status["refused"].get("unforeseen"), (
                f"defects of the hub: {status['refused']}; its log has the traceback"
            )
            seconds = time.monotonic() - began
            honest.go_on()
            honest.stop()
            return Report(num_frames, seconds, answers, (after - before) / 2**20, honest.steps, status)
        finally:
            honest.stop()
            process.kill()
            process.join()


def _serve(address: str, folder: str) -> None:
    config = QueueConfig(max_staleness=1, fsync="off", lease_s=30.0, segment_bytes=1 << 16)
    Hub(address, Path(folder), config, _BOUND, max_frame_bytes=MAX_FRAME_BYTES).run()


class _Strangers:
    """A few connections that send in turn and read what comes back."""

    def __init__(self, address: str, seed: int) -> None:
        self._address, self._rng = address, Random(seed)
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(_STRANGERS)]
        for each in self._sockets:
            each.setsockopt(zmq.SNDTIMEO, int(_DEADLINE_S * 1000))
            each.connect(address)
        self._turns = itertools.cycle(self._sockets)

    def __enter__(self) -> _Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def shout(self) -> None:
        """Bytes that are no ZeroMQ, or one of long ago."""
        shout(self._address, self._rng.choice(_GREETINGS) + self._rng.randbytes(self._rng.choice((1, 4, 60, 3000))))

    def finish(self) -> None:
        """Returns when the hub has taken in all: it answers a connection in order."""
        for each in self._sockets:
            deadline, answered = time.monotonic() + _DEADLINE_S, False
            while not answered:
                assert time.monotonic() < deadline, "the hub does not answer"
                # Again: a connection that is cut loses what lay behind the cut.
                each.send_multipart(wire.encode(wire.GetStatus(), request=_LAST))
                while not answered and each.poll(2000):
                    request, message, _ = wire.decode(each.recv_multipart(), max_frame_bytes=wire.MAX_FRAME_BYTES)
                    answered = request == _LAST and isinstance(message, wire.Status)

    def send(self, frames: wire.Frames) -> int:
        """How many answers came meanwhile, each a message of ours."""
        socket, answers = next(self._turns), 0
        socket.send_multipart(frames or [b""])
        while socket.poll(0):
            wire.decode(socket.recv_multipart(), max_frame_bytes=wire.MAX_FRAME_BYTES)
            answers += 1
        return answers


class Honest:
    """An actor and a learner, a thread each: every group must come back as it was made, once, in order."""

    def __init__(self, address: str) -> None:
        self.address, self.connect, self._ending = address, SocketLink, threading.Event()
        self._failed: BaseException | None = None
        self._threads = [threading.Thread(target=self._guard, args=(role,)) for role in (self._act, self._learn)]
        self.steps = 0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self.go_on()

    def go_on(self) -> None:
        """Returns when some more steps were done."""
        wanted, deadline = self.steps + 3, time.monotonic() + _DEADLINE_S
        while self.steps < wanted:
            self.check()
            assert time.monotonic() < deadline, f"no three steps in {_DEADLINE_S:.0f} s"
            time.sleep(0.01)

    def check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_DEADLINE_S)

    def _guard(self, role: Callable[[], None]) -> None:
        try:
            role()
        except BaseException as error:  # noqa: BLE001 (raised again by whoever checks)
            self._failed = error

    def _act(self) -> None:
        actor = Actor(self, "honest", 4, beat_s=0.2)
        while not self._ending.is_set():
            actor.look()
            actor.put(*actor.begun)
            assert not actor.client.refused, f"an honest put was refused: {actor.client.refused}"
        actor.close()

    def _learn(self) -> None:
        learner = LearnerClient(self.address, timeout_s=_DEADLINE_S)
        for _ in range(FENCE):
            learner.register(0, 0)
        assert learner.fence == FENCE
        learner.publish(0, _weights(0))
        while not self._ending.is_set():
            batch = learner.take(self.steps)
            assert not isinstance(batch, str), batch
            (group,) = batch.groups
            assert group.number == self.steps
            for rollout in group.rollouts:
                assert rollout.completion_ids.tolist() == [self.steps, group.newest_version, 7]
            learner.trained(self.steps)
            self.steps += 1
            learner.publish(self.steps, _weights(self.steps))
            learner.commit(self.steps)
        learner.close()


def _weights(version: int) -> dict[str, RawTensor]:
    return {"w": RawTensor("int32", (1,), np.array([version], "<i4").tobytes())}
