"""An actor's process: the real `Worker` and `ActorClient` around a fake engine and fake rewards, turned by the world."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, cast

import numpy as np

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.actors.engine import Completion, Partial, Request, RolloutKey, check_requests
from async_rlhf.actors.loop.context import RunContext
from async_rlhf.actors.loop.worker import Worker
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.scoring.pool import Scored, ScoringInterval, ScoringPool
from async_rlhf.buffers.clients.actor import ActorClient
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import AsyncRLHFError, DeadlineError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.record import Float32Array, Score, Span
from async_rlhf.buffers.tensors import RawTensor
from tests.simulation.hub_role import HubRole
from tests.simulation.invariants import ANOTHER
from tests.simulation.world import Network, SimLink, ViolationError

STILL = np.arange(60, dtype="<i4")
"""Weights that no step changes: most of a set, so that it is worth a delta."""


class FakeEngine:
    """Samples, as every token, the version written in the weights it really holds. stuck: samples nothing any more."""

    def __init__(self) -> None:
        self.version = -1
        self.progress, self.stuck = 0, False
        self._sampled_by = -1
        self._running: dict[RolloutKey, tuple[Request, list[tuple[int, int]]]] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, set(self._running))
        self._running.update({request.key: (request, []) for request in requests})

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        return sum(len(self._running.pop(key, (None, []))[1]) for key in keys)

    def step(self) -> list[Completion]:
        done = []
        if self.stuck:
            return done
        self.progress += len(self._running)
        for key, (request, tokens) in list(self._running.items()):
            tokens.append((self._sampled_by, self.version))
            if len(tokens) > request.seed % request.max_new_tokens:
                del self._running[key]
                done.append(self._completion(key, tokens))
        return done

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        return [
            Partial(key, self._completion(key, tokens).token_ids)
            for key, (request, tokens) in self._running.items()
            if request.partial_every and len(tokens) - known.get(key, 0) >= request.partial_every
        ]

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        self.version = version
        held = {int(number) for name in ("w", "b") if name in tensors for number in np.frombuffer(tensors[name].data, "<i4")}
        if len(held) > 1 or (held and bytes(tensors["still"].data) != STILL.tobytes()):
            raise ViolationError("truth", f"a weight set mixes versions {held}")
        self._sampled_by = next(iter(held), self._sampled_by)

    def probe(self, token_ids: Sequence[int], *, behind_images: bool = False) -> Float32Array:
        return np.zeros(len(token_ids) - 1, np.float32)

    def close(self) -> None: ...

    @staticmethod
    def _completion(key: RolloutKey, tokens: list[tuple[int, int]]) -> Completion:
        spans: list[Span] = []
        for _, label in tokens:
            if spans and spans[-1].version == label:
                spans[-1] = Span(label, spans[-1].num_tokens + 1)
            else:
                spans.append(Span(label, 1))
        ids = np.array([sampled_by for sampled_by, _ in tokens], np.int32)
        return Completion(key, ids, np.zeros(len(ids), np.float32), tuple(spans), "length")


class FakeScoring:
    """Answers after none or a few polls; of two groups in three with what a reference says of the tokens."""

    num_resent = 0

    def __init__(self, rng: Random) -> None:
        self._rng, self._pending, self._lengths = rng, dict[RolloutKey, int](), dict[RolloutKey, int]()
        self._began: dict[RolloutKey, float] = {}
        self.counters: dict[str, Any] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, key: RolloutKey, fields: Mapping[str, Any], place: object = None) -> None:
        self._pending[key] = self._rng.choice((0, 0, 0, 1, 3))
        self._lengths[key], self._began[key] = len(fields["completion_ids"]), time.time()

    def poll(self) -> list[Scored[RolloutKey]]:
        done = [key for key, left in self._pending.items() if left == 0]
        self._pending = {key: left - 1 for key, left in self._pending.items() if left > 0}
        # Two numbers after each other whose members are worth the same, then two whose members are not.
        return [
            Scored(
                key, {"reward": Score(float(key.member * (key.group // 2 % 2)))},
                stages={"reward": ScoringInterval(self._began.pop(key), time.time())}, reference=self._reference(key),
            )
            for key in done
        ]  # fmt: skip

    def _reference(self, key: RolloutKey) -> Float32Array | None:
        length = self._lengths.pop(key)
        return np.full(length, -0.5, np.float32) if key.group % 3 else None

    def discard(self, keys: Iterable[RolloutKey]) -> None:
        for key in keys:
            self._pending.pop(key, None)


class OneToken:
    """A tokenizer to which every text is one token, and every token one letter."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "t"


class ActorRole:
    """An actor's process under one name: the real `Worker`, turned by the world."""

    def __init__(
        self, name: str, hub: HubRole, network: Network, *, group_size: int, capacity: int, tokens: int, rows: int = 1
    ) -> None:
        self.name, self._hub, self._network, self._capacity = name, hub, network, capacity
        self._pace = hub.pace
        of_run = [Row("p", {"n": number} if rows > 1 else {}) for number in range(rows)]
        generation = GenerationConfig(group_size=group_size, max_completion_length=tokens)
        refill = Composition() if hub.bound.refills else None
        self._work = RunContext(7, of_run, generation, cast(Any, OneToken()), refill=refill)
        self._life = 0
        self._turn_at = float("inf")
        self._frozen_until = self.frozen_since = 0.0
        self.link: SimLink | None = None

    def start(self) -> None:
        self._life += 1
        self._turn_at = float("inf")
        life, world = self._life, self._hub.world
        self._hub.machine.begin(self.name)
        self.link = self._network.connect(self.name, lambda: self._soon(life))
        link = self.link
        client = ActorClient(
            self._hub.address, self.name, beat_s=self._pace.beat_s, timeout_s=self._pace.timeout_s, connect=lambda *_: link,
            weights=self._hub.weights,
            take_seat=None if self._hub.ether is None else partial(self._hub.ether.take_seat, self.process),
        )  # fmt: skip
        self._engine, scoring = FakeEngine(), cast("ScoringPool[RolloutKey]", FakeScoring(world.rng))
        self._worker = Worker(
            self.name, client, self._engine, scoring, self._work, self._capacity, 0.5, clock=lambda: world.now
        )
        self._client, self._scoring = client, scoring
        self._soon(life)

    @property
    def process(self) -> str:
        return f"{self.name}/{self._life}"

    @property
    def is_frozen(self) -> bool:
        return self._hub.world.now < self._frozen_until

    def freeze(self, seconds: float) -> None:
        self.frozen_since = self._hub.world.now
        self._frozen_until = self.frozen_since + seconds

    def hang(self) -> None:
        """In the collectives of the device channel; all else goes on."""
        if self._hub.ether is not None:
            self._hub.ether.hang(self.process)

    def load(self, seconds: float) -> None:
        """The engine keeps the actor's thread for so long; the other one beats."""
        self.freeze(seconds)
        if seconds > self._pace.progress_timeout_s - 1:
            self._hub.observer.ends += 1  # it may count
        if self.link is not None:
            self._beat_on(self._life, self._client)

    def _beat_on(self, life: int, client: ActorClient) -> None:
        if life != self._life or self._hub.world.now >= self._frozen_until:
            return
        if client._hello_sent and client._newest is not None:
            client.beat(*client._newest)
        self._hub.world.after(self._pace.beat_s, f"beat {self.name}", lambda: self._beat_on(life, client))

    def get_stuck(self) -> None:
        """Its engine samples nothing any more, until it is ended."""
        if self.link is not None:
            self._engine.stuck = True
            self._hub.observer.ends += 10  # as often as it is given something

    def double(self) -> None:
        """Another process claims its name, for longer than a dead one would keep it."""
        world, link = self._hub.world, self._network.connect(self.name)
        hello = wire.Hello(actor=self.name, life=ANOTHER, capacity=4, fence=0, version=-1)
        self._hub.observer.claims += 1

        def claim(left: int) -> None:
            link.send(wire.encode(hello, request=left + 1))
            if left:
                world.after(self._pace.beat_s, f"another {self.name}", lambda: claim(left - 1))
            else:
                world.after(self._pace.beat_s, f"another {self.name} gives up", link.close)

        claim(5)

    def kill(self, *, told: bool) -> None:
        """Dies with everything it holds; the supervisor tells the hub, or the lease runs out."""
        if self.link is None:
            return
        self.link.close()
        self.link = None
        if self._hub.ether is not None:
            self._hub.ether.ended(self.process)
        self._life += 1
        world = self._hub.world
        self._hub.observer.ends += 1
        if told:
            control, gone = self._hub.network.connect("supervisor"), wire.encode(wire.Gone(actor=self.name), request=1)
            world.after(0.05, f"gone {self.name}", lambda: self._tell(control, gone))
        world.after(world.rng.uniform(0.1, 1.0), f"{self.name} starts", self.start)

    @staticmethod
    def _tell(control: SimLink, gone: wire.Frames) -> None:
        control.send(gone)

    def _soon(self, life: int, delay: float | None = None) -> None:
        world = self._hub.world
        at = world.now + (world.rng.uniform(0.0005, 0.003) if delay is None else delay)
        if life == self._life and at < self._turn_at:
            self._turn_at = at
            world.after(at - world.now, f"turn {self.name}", lambda: self._turn(life, at))

    def _turn(self, life: int, at: float) -> None:
        if life != self._life or at != self._turn_at:
            return
        world = self._hub.world
        self._turn_at = float("inf")
        if world.now < self._frozen_until:
            self._soon(life, self._frozen_until - world.now)
            return
        try:
            with self._hub.machine.run(self.name):
                self._worker.turn()
        except DeadlineError:
            self.kill(told=True)
            return
        except (AsyncRLHFError, KeyError) as error:
            # No order of messages that a connection allows may end an actor; in the wild it may, and is started again. So it is
            # where another process claimed the name first.
            came_second = isinstance(error, RefusedError) and error.reason == "name-taken" and self._hub.observer.claims
            if not (self._hub.network.was_wild or came_second):
                raise ViolationError("crash", f"{self.name} ended: {error!r}") from error
            self.kill(told=True)
            return
        if self._client.stop_reason is not None:
            self._life += 1
            return
        self._hub.observer.serves(self.process, self._worker._fence, self._engine.version, wild=self._hub.network.was_wild)
        busy = self._engine.num_unfinished or self._scoring.num_pending
        self._soon(life, world.rng.uniform(0.005, 0.03) if busy else self._pace.beat_s)
