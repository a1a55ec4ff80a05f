"""A hub, a learner or an engine of the device channel as a process of its own, which prints how far it is and waits at given
points: `python -m tests.buffers.device.peers ROLE STOPS ADDRESS ...`.

STOPS, with commas: `group` before it joins a group, `bucket` after the first bucket of a set, `set` when its digests are taken.
Once SIGUSR1 has come it stops at the next of these, prints it, and goes on with a line on its standard input.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig, WeightsConfig
from async_rlhf.buffers.device import ends, group
from async_rlhf.buffers.errors import HubRestartedError
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from tests.buffers.weights.fleet import came_by

TIMEOUT_S = 10.0
"""Of a broadcast."""
DEVICE = WeightsConfig(transport="device", device_timeout_s=TIMEOUT_S)
DEADLINE_S = 120.0
NUM_WORDS = 3 << 19  # three buckets


def tensors(content: int) -> dict[str, RawTensor]:
    """Every word is `content`."""
    return {"w": RawTensor("bfloat16", (NUM_WORDS,), np.full(NUM_WORDS, content, "<u2").tobytes())}


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def stop_at(stops: list[str]) -> None:
    """This process waits at these points."""
    armed = threading.Event()

    def arm(*_: Any) -> None:
        armed.set()
        os.write(1, b'{"armed": true}\n')  # `print` may be at work

    def reached(point: str) -> None:
        if point in stops and armed.is_set():
            armed.clear()
            report(at=point)
            sys.stdin.readline()

    signal.signal(signal.SIGUSR1, arm)
    make, broadcast, finish = group.GlooGroup.__init__, group.GlooGroup.broadcast, ends._pass_on
    ends._BUCKET_BYTES = 1 << 20

    def made(self: group.GlooGroup, *arguments: Any) -> None:
        reached("group")
        make(self, *arguments)

    def sent(self: group.GlooGroup, tensor: Any) -> Any:
        work = broadcast(self, tensor)
        if len(tensor) == 1 << 20:
            work.wait()
            reached("bucket")
        return work

    def passed(*arguments: Any, **sends: Any) -> Any:
        specs = finish(*arguments, **sends)
        reached("set")
        return specs

    group.GlooGroup.__init__, group.GlooGroup.broadcast, ends._pass_on = made, sent, passed  # type: ignore[method-assign]


def hub(address: str, folder: str) -> None:
    bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
    Hub(address, Path(folder), QueueConfig(max_staleness=1, lease_s=60), bound, weights=DEVICE).run()


def learner(address: str) -> None:
    """Publishes version 0, with the content of a number that it reads, under one fence after the other."""
    broadcaster = ends.LearnerEnd(TIMEOUT_S)
    client = LearnerClient(address, timeout_s=DEADLINE_S, weights=DEVICE, broadcaster=broadcaster)
    for line in iter(sys.stdin.readline, ""):
        while True:
            try:
                client.register(0, 0)
                client.publish(0, tensors(int(line)))
                break
            except HubRestartedError:
                continue
        report(published=int(line))
    client.close()


def engine(address: str, name: str) -> None:
    """Adopts whatever is announced to it, and prints what that is and how it came."""
    take_seat = ends.EngineEnd(TIMEOUT_S)
    client = ActorClient(address, name, beat_s=0.05, timeout_s=DEADLINE_S, weights=DEVICE, take_seat=take_seat)
    client.keep_beating()
    state = ActorState(0, 0, -1, ())
    while client.stop_reason is None:
        client.poll(state, wire.Telemetry(), timeout_s=0.02)
        if (weights := client.weights()) is not None:
            state = ActorState(0, weights.fence, weights.version, ())
            client.beat(state, wire.Telemetry())
            words = np.frombuffer(weights.tensors()["w"].data, "<u2")
            content = int(words[0])
            assert (words == content).all(), "a mixture"
            report(adopted=content, came=came_by(weights))


class Peer:
    """The process, as a test sees it. Its lines are read by a thread."""

    def __init__(self, role: str, *arguments: str, stops: str = "") -> None:
        command = [sys.executable, "-m", "tests.buffers.device.peers", role, stops, *arguments]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def until(self, **what: Any) -> dict[str, Any]:
        """The first line from now on that has this."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"waited {DEADLINE_S} s for {what}") from None
            if what.items() <= line.items():
                return line

    def send(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def arm(self) -> None:
        self.signal(signal.SIGUSR1)
        self.until(armed=True)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


ROLES = {"hub": hub, "learner": learner, "engine": engine}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    role, where, *rest = sys.argv[1:]
    stop_at(where.split(","))
    ROLES[role](*rest)
