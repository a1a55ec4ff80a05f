"""A hub with one learner that publishes again and again, and actors that only adopt: for tests of the weight channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig, WeightsConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.keys import load_hub
from async_rlhf.buffers.transport.link import connector
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES

DEADLINE_S = 30.0
SIZE = 3 * CHUNK_BYTES // 2
CHUNKS = WeightsConfig(transport="chunks")


def words(version: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Version after version, one more element in a hundred is one unit higher."""
    rng = np.random.default_rng(0)
    all_words = rng.integers(0, 1 << 16, SIZE, dtype=np.uint16)
    for _ in range(version):
        all_words[rng.integers(0, SIZE, SIZE // 100)] += 1
    return all_words


def tensors(version: int) -> dict[str, RawTensor]:
    return {"w": RawTensor("bfloat16", (SIZE,), words(version).tobytes()), "b": RawTensor("float32", (), b"abcd")}


class Fleet:
    """A hub in a thread and one learner, which publishes version 0 again and again under new fences; `keys` are theirs."""

    def __init__(
        self, folder: Path, address: str, hub: WeightsConfig, learner: WeightsConfig, keys: Path | None = None
    ) -> None:
        self.address, self._folder, self._config, self._pool = address, folder, hub, ThreadPoolExecutor(1)
        self._keys, self._connect = keys, connector(keys)
        self._begin()
        self.learner = LearnerClient(address, timeout_s=DEADLINE_S, weights=learner, connect=self._connect)

    def _begin(self) -> None:
        bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
        access = None if self._keys is None else load_hub(self._keys)
        hub = Hub(self.address, self._folder, QueueConfig(), bound, weights=self._config, access=access)
        self._running: Future[None] = self._pool.submit(hub.run)

    def restart(self) -> None:
        """The hub ends and is begun again, with its journal and without weights."""
        self._end()
        self._begin()

    def _end(self) -> None:
        with control(self.address, timeout_s=DEADLINE_S, connect=self._connect) as operator:
            operator.halt()
        self._running.result(DEADLINE_S)

    def publish(self, content: int) -> None:
        self.learner.register(0, 0)
        self.learner.publish(0, tensors(content))

    def status(self) -> dict[str, Any]:
        with control(self.address, timeout_s=DEADLINE_S, connect=self._connect) as operator:
            return dict(operator.status())

    def close(self) -> None:
        self.learner.close()
        self._end()
        self._pool.shutdown()


class HasAddress(Protocol):
    address: str


class Actor:
    """Adopts what it is told to."""

    def __init__(self, place: HasAddress, name: str, weights: WeightsConfig = CHUNKS, keys: Path | None = None) -> None:
        self.client = ActorClient(
            place.address, name, beat_s=0.05, timeout_s=DEADLINE_S, weights=weights, connect=connector(keys)
        )
        self.serving = (0, -1)
        self.words = b""

    def look(self) -> bool:
        self.client.poll(ActorState(0, *self.serving, ()), wire.Telemetry(), timeout_s=0.02)
        weights = self.client.weights()
        if weights is None:
            return False
        self.words, self.serving = bytes(weights.tensors()["w"].data), (weights.fence, weights.version)
        return True

    def adopt(self, content: int) -> None:
        """Look until a set has been adopted, which must be this one."""
        until(self.look)
        assert self.words == words(content).tobytes()


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s"


@contextmanager
def actors(*made: Actor) -> Iterator[None]:
    try:
        yield
    finally:
        for actor in made:
            actor.client.close()
