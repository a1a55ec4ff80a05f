"""A hub with one learner that publishes again and again, and actors that only adopt: for tests of the weight channel."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.keys import load_hub
from async_rlhf.buffers.transport.link import connector
from async_rlhf.buffers.weights.relay import Relay
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet
from tests.buffers.hub.place import DEADLINE_S, Actor, Place, Reached, until

SIZE = 3 * CHUNK_BYTES // 2
WHOLE = 2 * SIZE + 4
"""Bytes of a set."""
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


def came_by(weights: WeightSet) -> str:
    """`hub` or `broadcast`: whose digests the set has."""
    (spec, *_), (raw, *_) = weights.specs, weights.tensors().values()
    return "hub" if spec.digest == xxhash.xxh3_128_hexdigest(raw.data) else "broadcast"


class Adopter(Actor):
    """Asks for nothing to do."""

    def __init__(self, place: Reached, name: str, weights: WeightsConfig = CHUNKS, **options: Any) -> None:
        super().__init__(place, name, 0, weights=weights, **options)
        self.came: list[str] = []

    def look(self) -> None:
        before = len(self.adopted)
        super().look()
        if len(self.adopted) > before:
            assert self.newest is not None
            self.came.append(came_by(self.newest))

    def adopt(self, content: int) -> None:
        """Look until a set has been adopted, which must be this one."""
        before = len(self.adopted)
        until(lambda: len(self.adopted) > before, self)
        self.check(content)

    def check(self, content: int) -> None:
        assert self.tensors["w"] == words(content).tobytes()


class Fleet(Place):
    """A hub, and one learner, which publishes version 0 again and again under new fences; `keys` are theirs."""

    def __init__(
        self,
        folder: Path,
        address: str,
        hub: WeightsConfig = CHUNKS,
        learner: WeightsConfig = CHUNKS,
        keys: Path | None = None,
        **config: Any,
    ) -> None:
        bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
        super().__init__(folder, address, bound, {"weights": hub}, keys, **config)
        self.begin()
        self.source = self.keep(LearnerClient(address, timeout_s=DEADLINE_S, weights=learner, connect=self.connect))

    def member(self, name: str, weights: WeightsConfig = CHUNKS, **options: Any) -> Adopter:
        return self.keep(Adopter(self, name, weights, **options))

    def relay(
        self, name: str = "relay", weights: WeightsConfig = CHUNKS, *, hub: str = "", keys: Path | None = None
    ) -> Station:
        """hub: the address that it stands before, this one's unless another is given."""
        return self.keep(Station(hub or self.address, f"{self.address}-{name}", weights, keys))

    def publish(self, content: int) -> None:
        self.source.register(0, 0)
        self.source.publish(0, tensors(content))

    @property
    def weights(self) -> dict[str, Any]:
        """Their part of the hub's status."""
        return dict(self.status()["weights"])


class Station:
    """A relay to a hub, or to another relay: it can be ended and begun again. own: what it speaks to the hub with. keys: of
    those who may speak to it."""

    def __init__(self, hub: str, address: str, weights: WeightsConfig = CHUNKS, keys: Path | None = None) -> None:
        self.hub, self.address, self.weights, self.keys = hub, address, weights, keys
        self._pool = ThreadPoolExecutor(1)
        self._running: tuple[Relay, Future[None]] | None = None

    def begin(self, own: Path | None = None) -> Future[None]:
        access = None if self.keys is None else load_hub(self.keys)
        relay = Relay(self.hub, self.address, self.weights, connector(own), access)
        self._running = relay, self._pool.submit(relay.run)
        return self._running[1]

    def end(self) -> None:
        """And with it everything it knew."""
        if self._running is not None:
            (relay, running), self._running = self._running, None
            relay.stop()
            if not running.done():
                running.result(DEADLINE_S)

    def close(self) -> None:
        self.end()
        self._pool.shutdown()
