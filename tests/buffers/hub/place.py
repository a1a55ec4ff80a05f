"""A real hub at an address, and both ends of every conversation; groups are made by hand instead of by an engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient, TakenBatch
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.keys import load_hub
from async_rlhf.buffers.transport.link import Connect, Connection, connector
from async_rlhf.buffers.weights.weight_set import WeightSet


class Closes(Protocol):
    def close(self) -> None: ...


class Reached(Protocol):
    address: str
    connect: Connect


Peer = TypeVar("Peer", bound=Closes)
DEADLINE_S = 120.0
TELEMETRY = wire.Telemetry(tokens_total=3.0)


class Place:
    """Where a hub lives: it can be ended and begun again at the same address and directory. Its peers are closed before it."""

    def __init__(
        self,
        folder: Path,
        address: str,
        bound: Bound,
        wanted: Mapping[str, Any] | None = None,
        keys: Path | None = None,
        **config: Any,
    ) -> None:
        """wanted: of the hub beside its configuration. keys: the hub's, and those of its peers that bring no others."""
        self.folder, self.address, self.bound = folder, address, bound
        self._wanted, self._keys, self.connect = dict(wanted or {}), keys, connector(keys)
        if "max_frame_bytes" in config:
            self._wanted["max_frame_bytes"] = config.pop("max_frame_bytes")
        self.config = QueueConfig(max_staleness=bound.max_staleness, window=bound.window, exact=bound.exact, **config)
        self._pool, self._peers = ThreadPoolExecutor(max_workers=4), ExitStack()
        self._running: Future[None] | None = None

    def begin(self) -> None:
        access = None if self._keys is None else load_hub(self._keys)
        hub = Hub(self.address, self.folder, self.config, self.bound, access=access, **self._wanted)
        self._running = self._pool.submit(hub.run)

    def end(self) -> None:
        """Returns when the hub has; raises what it raised."""
        if self._running is not None:
            running, self._running = self._running, None
            if not running.done():
                with self.control() as operator:
                    operator.halt()
            running.result(DEADLINE_S)

    def restart(self) -> None:
        self.end()
        self.begin()

    def actor(self, *arguments: Any, **options: Any) -> Actor:
        return self.keep(Actor(self, *arguments, **options))

    def learner(self, step: int = 0, *, publishes: bool = True, **options: Any) -> LearnerClient:
        """One that has registered and, unless it shall not, published the version of its step."""
        learner = self.keep(LearnerClient(self.address, timeout_s=DEADLINE_S, **{"connect": self.connect} | options))
        if publishes:
            come_back(learner, step)
        else:
            learner.register(step, 0)
        return learner

    def stranger(self, name: str, *, address: str = "", connect: Connect | None = None) -> Connection:
        return self.keep(Connection((connect or self.connect)(address or self.address, name)))

    def keep(self, peer: Peer) -> Peer:
        """Closed before the hub."""
        self._peers.callback(peer.close)
        return peer

    def control(self) -> Any:
        return control(self.address, timeout_s=DEADLINE_S, connect=self.connect)

    def status(self) -> dict[str, Any]:
        with self.control() as operator:
            status = operator.status()
        assert status["ledger"]["closes"]
        return dict(status)

    def meanwhile(self, call: Callable[[], Any]) -> Future[Any]:
        """Something that blocks, in a thread of its own."""
        return self._pool.submit(call)

    def close(self) -> None:
        try:
            self._peers.close()
            self.end()
        finally:
            self._pool.shutdown(cancel_futures=True)


def a_group(number: int, attempt: int, version: int, actor: str, text: str = "") -> Group:
    """Two completions whose tokens tell group and version."""
    ids = np.array([number, version, 7], np.int32)
    logprobs = np.array([-0.5, -1.5, -2.5], np.float32)
    rollouts = tuple(Rollout(ids, logprobs, (Span(version, 3),), "stop", {"right": Score(1.0)}, text) for _ in range(2))
    return Group(
        number, attempt, np.array([1, 2], np.int32), rollouts, Sampling(), actor, f"prompt {number}", {"answer": number}
    )


class Actor:
    """An actor whose engine is the test: it adopts what is announced to it and holds what it is credited until `put`."""

    def __init__(self, place: Reached, name: str = "anna", capacity: int = 8, **options: Any) -> None:
        self.name, self.capacity = name, capacity
        known = {"address": place.address, "connect": place.connect}
        given = known | {"beat_s": 0.05, "timeout_s": DEADLINE_S} | options
        self.client = ActorClient(given.pop("address"), name, **given)
        self.fence, self.version = 0, -1
        self.begun: dict[int, int] = {}
        self.adopted: list[tuple[int, int]] = []
        self.tensors: dict[str, bytes] = {}
        self.newest: WeightSet | None = None
        self.is_closed = False

    def look(self) -> None:
        self.client.poll(self.state, TELEMETRY, timeout_s=0.02)
        if (weights := self.client.weights()) is not None:
            if weights.version < self.version:
                self.client.release(list(self.begun))
                self.begun.clear()
            self.fence, self.version, self.newest = weights.fence, weights.version, weights
            self.adopted.append((weights.fence, weights.version))
            self.tensors = {name: bytes(tensor.data) for name, tensor in weights.tensors().items()}
            self.client.beat(self.state, TELEMETRY)
        self.begun |= {credit.number: credit.attempt for credit in self.client.credits()}

    @property
    def state(self) -> ActorState:
        progress = tuple((number, 1) for number in self.begun)
        return ActorState(self.capacity, self.fence, self.version, tuple(self.begun.items()), progress)

    def put(self, *numbers: int, text: str = "") -> None:
        for number in numbers:
            self.client.put(a_group(number, self.begun.pop(number), self.version, self.name, text))

    def makes(self, *numbers: int, text: str = "") -> None:
        """Waits until it holds these, puts them in this order, and waits until they are acknowledged."""
        until(holds(self, *numbers), self)
        self.put(*numbers, text=text)
        until(delivered(self), self)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.client.close()


Begun = tuple[Place, Actor, LearnerClient]
"""A hub, an actor called anna, and a learner that has published the version of its step."""


def shout(address: str, *pieces: bytes) -> None:
    """Bytes at a hub's ipc socket, which are no message; the hub may hang up at any of them."""
    with socket.socket(socket.AF_UNIX) as raw, suppress(OSError):
        raw.settimeout(DEADLINE_S)
        raw.connect(address.removeprefix("ipc://"))
        for piece in pieces:
            raw.sendall(piece)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(4096):
            pass


def until(what: Callable[[], Any], *actors: Actor) -> None:
    """Let the actors look round until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s; {[(a.name, a.begun, a.adopted) for a in actors]}"
        for actor in actors:
            actor.look()
        if not actors:
            time.sleep(0.01)


def delivered(actor: Actor) -> Callable[[], bool]:
    return lambda: not actor.client.unacknowledged


def holds(actor: Actor, *numbers: int) -> Callable[[], bool]:
    return lambda: actor.begun.keys() >= set(numbers)


def tensors(seed: int, size: int = 40) -> dict[str, RawTensor]:
    return {"w": RawTensor("uint8", (size,), np.random.default_rng(seed).bytes(size)), "b": RawTensor("float32", (), b"abcd")}


def come_back(learner: LearnerClient, step: int = 0) -> None:
    """Register, and publish the version of this step."""
    learner.register(step, 0)
    learner.publish(step, tensors(step))


def taken(learner: LearnerClient, step: int) -> list[int]:
    batch = learner.take(step)
    assert isinstance(batch, TakenBatch), batch
    return [group.number for group in batch.groups]


def train(learner: LearnerClient, step: int) -> list[int]:
    """One step whose batch is there: take, trained, publish."""
    numbers = taken(learner, step)
    learner.trained(step)
    learner.publish(step + 1, tensors(step + 1))
    return numbers
