"""A real hub, real sockets, and both ends of every conversation; groups are made by hand instead of by an engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.connection import Connection, HubRestartedError
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient, TakenBatch
from async_rlhf.buffers.config import QueueConfig, WeightsConfig
from async_rlhf.buffers.errors import JournalError, RefusedError, WireError
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.transport.link import SocketLink
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet

DEADLINE_S = 30.0
QUICK_LEASE_S = 0.4
TELEMETRY = wire.Telemetry(tokens_total=3.0)


class Place:
    """Where a hub lives: it can be ended and begun again at the same address and directory."""

    def __init__(
        self, folder: Path, address: str, bound: Bound, wanted: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        """wanted: of every actor and group, `shared` and `schema` of the hub."""
        self.folder, self.address, self.bound, self.wanted = folder, address, bound, dict(wanted or {})
        self.config = QueueConfig(max_staleness=bound.max_staleness, window=bound.window, exact=bound.exact, **config)
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._running: Future[None] | None = None

    def begin(self) -> None:
        hub = Hub(self.address, self.folder, self.config, self.bound, **self.wanted)
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

    def control(self) -> Any:
        return control(self.address, timeout_s=DEADLINE_S)

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
            self.end()
        finally:
            self._pool.shutdown(cancel_futures=True)


@pytest.fixture
def place(tmp_path: Path, socket_dir: Path) -> Iterator[Callable[..., Place]]:
    """`place(Bound(...), lease_s=1)`: a hub that runs until the test ends."""
    places: list[Place] = []

    def make(bound: Bound, **config: Any) -> Place:
        places.append(Place(tmp_path / f"run{len(places)}", f"ipc://{socket_dir}/hub{len(places)}", bound, **config))
        places[-1].begin()
        return places[-1]

    yield make
    for each in places:
        each.close()


def a_group(number: int, attempt: int, version: int, actor: str, text: str = "") -> Group:
    """Two completions whose tokens tell group and version."""
    ids = np.array([number, version, 7], np.int32)
    logprobs = np.array([-0.5, -1.5, -2.5], np.float32)
    rollouts = tuple(Rollout(ids, logprobs, (Span(version, 3),), "stop", {"right": Score(1.0)}, text) for _ in range(2))
    return Group(number, attempt, np.array([1, 2], np.int32), rollouts, 1.0, actor, f"prompt {number}", {"answer": number})


class Actor:
    """An actor whose engine is the test: it adopts what it is told to and holds what it is credited until `put`."""

    def __init__(self, place: Place, name: str = "anna", capacity: int = 8, **options: Any) -> None:
        self.name, self.capacity = name, capacity
        given = {"address": place.address, "beat_s": 0.05, "timeout_s": DEADLINE_S} | options
        self.client = ActorClient(given.pop("address"), name, **given)
        self.fence, self.version = 0, -1
        self.begun: dict[int, int] = {}
        self.adopted: list[tuple[int, int]] = []
        self.tensors: dict[str, bytes] = {}
        self.adopts = True

    def look(self) -> None:
        self.client.poll(self.state, TELEMETRY, timeout_s=0.02)
        if self.adopts and (weights := self.client.weights()) is not None:
            if weights.version < self.version:
                self.client.release(list(self.begun))
                self.begun.clear()
            self.fence, self.version = weights.fence, weights.version
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


def holds(actor: Actor, number: int) -> Callable[[], bool]:
    return lambda: number in actor.begun


@contextmanager
def peers(*made: Actor | LearnerClient | Connection) -> Iterator[None]:
    try:
        yield
    finally:
        for each in made:
            (each.client if isinstance(each, Actor) else each).close()


def tensors(seed: int, size: int = 40) -> dict[str, RawTensor]:
    return {"w": RawTensor("uint8", (size,), np.random.default_rng(seed).bytes(size)), "b": RawTensor("float32", (), b"abcd")}


def learner_of(place: Place, step: int = 0, committed: int = 0) -> LearnerClient:
    learner = LearnerClient(place.address, timeout_s=DEADLINE_S)
    learner.register(step, committed)
    return learner


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


# The walk


def test_one_step_through_every_message(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=1, num_groups=8))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        assert anna.adopted == [(learner.fence, 0)]
        assert anna.tensors == {name: bytes(tensor.data) for name, tensor in tensors(0).items()}
        assert anna.begun == {0: 0, 1: 0, 2: 0, 3: 0}
        anna.put(1, 0)
        until(delivered(anna), anna)
        batch = learner.take(0)
        assert isinstance(batch, TakenBatch)
        for group, number in zip(batch.groups, (0, 1), strict=True):
            sent = a_group(number, 0, 0, "anna")
            assert (group.number, group.attempt, group.prompt, group.columns) == (number, 0, sent.prompt, sent.columns)
            for got, gave in zip(group.rollouts, sent.rollouts, strict=True):
                np.testing.assert_array_equal(got.completion_ids, gave.completion_ids)
                np.testing.assert_array_equal(got.logprobs, gave.logprobs)
                assert (got.spans, got.scores, got.finish_reason) == (gave.spans, gave.scores, gave.finish_reason)
        assert batch.telemetry["actors"] == 1.0
        assert batch.telemetry["tokens_total"] == 3.0
        learner.trained(0)
        learner.publish(1, tensors(1))
        until(lambda: 5 in anna.begun, anna)
        assert anna.adopted[-1] == (learner.fence, 1)
        learner.commit(1)
        status = hub.status()
        assert (status["step"], status["committed_step"], status["version"], status["state"]) == (1, 1, 1, "running")
        ledger = status["ledger"]
        assert (ledger["credited"], ledger["trained"], ledger["committed"], ledger["leased"]) == (6, 2, 2, 4)
        assert ledger["tokens_trained"] == 12
    hub.end()
    assert json.loads((hub.folder / "ledger.json").read_text())["ledger"]["trained"] == 2


def test_a_learner_may_wait_before_the_first_actor_comes(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 0, 4))
    learner = learner_of(hub)
    learner.publish(0, tensors(0))
    waiting = hub.meanwhile(lambda: taken(learner, 0))
    until(lambda: hub.status()["waiting_for"] == "no actor has joined")
    anna = Actor(hub)
    with peers(anna, learner):
        until(lambda: anna.begun, anna)
        anna.put(0, 1)
        until(waiting.done, anna)
        assert waiting.result() == [0, 1]


def test_without_staleness_the_next_step_is_credited_only_to_who_adopted_its_version(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=6))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        assert sorted(anna.begun) == [0, 1]
        anna.put(0, 1)
        until(delivered(anna), anna)
        assert taken(learner, 0) == [0, 1]
        learner.trained(0)
        assert hub.status()["ledger"]["leased"] == 0
        anna.adopts = False
        learner.publish(1, tensors(1))
        until(lambda: anna.client.weights(), anna)  # fetched, but not adopted
        anna.look()
        assert hub.status()["ledger"]["leased"] == 0, "published, but nobody serves it"
        anna.fence, anna.version = learner.fence, 1
        until(lambda: anna.begun, anna)
        assert sorted(anna.begun) == [2, 3]


def test_a_window_lets_ready_groups_overtake(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=2, num_groups=12, window=3))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: {0, 1, 2} <= anna.begun.keys(), anna)
        anna.put(1, 2)
        until(delivered(anna), anna)
        assert train(learner, 0) == [1, 2]


def test_the_data_ends_with_a_batch_of_what_is_left_and_everybody_is_told(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=1, num_groups=3))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 3, anna)
        anna.put(0, 1, 2)
        until(delivered(anna), anna)
        assert train(learner, 0) == [0, 1]
        assert train(learner, 1) == [2]
        assert learner.take(2) == "end of data"
        until(lambda: anna.client.stop_reason, anna)
        assert anna.client.stop_reason == "end of data"
        late = Actor(hub, "late")
        with peers(late):
            until(lambda: late.client.stop_reason, late)


def test_a_drain_finishes_what_is_begun_and_ends(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=1, num_groups=100))
    anna, learner = Actor(hub, capacity=3), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 3, anna)
        with hub.control() as operator:
            operator.drain()
        assert hub.status()["state"] == "draining"
        anna.put(0, 1)
        until(delivered(anna), anna)
        assert train(learner, 0) == [0, 1]
        ending = hub.meanwhile(lambda: learner.take(1))
        until(ending.done, anna)
        assert ending.result() == "drained"
        until(lambda: anna.client.stop_reason == "drained", anna)
        assert sorted(anna.begun) == [2], "nothing was credited after the drain"


def test_many_long_texts_make_a_batch(place: Callable[..., Place]) -> None:
    """Each group's header is within its limit; a batch of them is not one header."""
    hub = place(Bound(groups_per_batch=4, max_staleness=0, num_groups=4))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 4, anna)
        anna.put(0, 1, 2, 3, text="é" * (wire.MAX_HEADER_BYTES // 5))
        until(delivered(anna), anna)
        assert train(learner, 0) == [0, 1, 2, 3]


# What is repeated, late or from the wrong one


def test_a_put_that_comes_twice_is_counted_and_refused(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        anna.put(0)
        anna.client.put(a_group(0, 0, 0, "anna"))
        until(lambda: anna.client.refused, anna)
        assert list(anna.client.refused) == [(0, "duplicate")]
        ledger = hub.status()["ledger"]
        assert (ledger["queued"], ledger["duplicates_refused"]) == (1, 1)


def test_a_put_for_what_another_actor_holds_is_superseded(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8))
    anna, learner = Actor(hub, capacity=2), learner_of(hub)
    ben = Actor(hub, "ben", capacity=2)
    with peers(anna, ben, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == len(ben.begun) == 2, anna, ben)
        stolen = next(iter(ben.begun))
        anna.client.put(a_group(stolen, 0, 0, "anna"))
        until(lambda: anna.client.refused, anna)
        assert list(anna.client.refused) == [(stolen, "superseded")]
        ben.put(stolen)
        until(delivered(ben), ben)
        assert hub.status()["ledger"]["queued"] == 1


def test_a_registration_that_was_sent_twice_is_one(place: Callable[..., Place]) -> None:
    """What a learner does that asks while the hub is away."""
    hub = place(Bound(2, 1, 8))
    link = SocketLink(hub.address, "learner")
    frames = wire.encode(wire.Register(step=0, committed=0, learner="a"), request=1)
    for _ in range(2):
        assert link.send(frames)
    fences = []
    for _ in range(2):
        answer = link.receive(DEADLINE_S) or link.receive(DEADLINE_S)
        assert answer is not None
        _, message, _ = wire.decode(answer, max_frame_bytes=1 << 20)
        assert isinstance(message, wire.Registered)
        fences.append(message.fence)
    link.close()
    assert fences[0] == fences[1] == hub.status()["fence"]


def test_a_second_learner_takes_over_and_the_first_is_told(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    anna, first = Actor(hub), learner_of(hub)
    with peers(anna, first):
        first.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        anna.put(0, 1)
        until(delivered(anna), anna)
        assert taken(first, 0) == [0]
        first.trained(0)
        first.publish(1, tensors(1))
        assert taken(first, 1) == [1]
        second = learner_of(hub, step=0)
        with peers(second):
            second.publish(0, tensors(0))
            for call in (lambda: first.take(1), lambda: first.publish(1, {}), lambda: first.commit(1)):
                with pytest.raises(RefusedError, match="fenced"):
                    call()
            with pytest.raises(RefusedError, match="fenced"):
                first.register(1, 0)
            hub.restart()
            with pytest.raises(RefusedError, match="fenced"):
                first.take(1)
            with pytest.raises(HubRestartedError, match="unregistered"):
                second.take(0)
            second.register(0, 0)
            second.publish(0, tensors(0))
            assert [train(second, 0), train(second, 1)] == [[0], [1]], "the same batches again"
            assert hub.status()["ledger"]["trained"] == 2


def test_a_learner_out_of_step_is_told(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    learner = learner_of(hub)
    with peers(learner):
        for call in (lambda: learner.take(1), lambda: learner.commit(1), lambda: learner.publish(3, tensors(3))):
            with pytest.raises(RefusedError, match="order"):
                call()
        with pytest.raises(RefusedError, match="unknown-step"):
            learner.register(5, 5)


@pytest.mark.parametrize("goes_on", ["take", "publish", "commit"])
def test_who_goes_on_has_trained_on_the_batch_before_whatever_was_lost(place: Callable[..., Place], goes_on: str) -> None:
    hub = place(Bound(1, 1, 8))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 2, anna)
        anna.put(0, 1)
        until(delivered(anna), anna)
        assert taken(learner, 0) == [0]
        if goes_on == "publish":
            learner.publish(1, tensors(1))
        elif goes_on == "commit":
            learner.commit(1)
        assert taken(learner, 1) == [1]
        assert hub.status()["ledger"]["trained"] == 1


# Who dies


def test_a_restarted_hub_loses_nothing_and_trains_nothing_twice(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=1, num_groups=12))
    anna, learner = Actor(hub), learner_of(hub)
    seen: list[int] = []
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 4, anna)
        anna.put(0, 1)
        until(delivered(anna), anna)
        seen += taken(learner, 0)
        learner.trained(0)
        anna.put(2)
        until(delivered(anna), anna)

        hub.end()
        anna.put(3)  # while nobody hears it
        anna.look()
        hub.begin()
        until(delivered(anna), anna)
        assert not anna.client.refused, "the group made for the hub that died is not thrown away"
        with pytest.raises(HubRestartedError):
            learner.publish(1, tensors(1))
        learner.register(1, 0)
        learner.publish(1, tensors(1))
        seen += train(learner, 1)
        while len(seen) < 12:
            until(lambda: len(anna.begun) >= 2, anna)
            anna.put(*sorted(anna.begun)[:2])
            until(delivered(anna), anna)
            seen += train(learner, len(seen) // 2)
        assert seen == list(range(12))
        ledger = hub.status()["ledger"]
        assert (ledger["trained"], ledger["stale"], ledger["failed"]) == (12, 0, 0)


def test_a_hub_restarted_again_and_again_offers_the_same_batches(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=2, num_groups=8, window=3), segment_bytes=1 << 12)
    anna, learner = Actor(hub), learner_of(hub)
    batches = []
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: {0, 1, 2} <= anna.begun.keys(), anna)
        anna.put(2, 1)
        until(delivered(anna), anna)
        for _ in range(3):
            batches.append(taken(learner, 0))
            hub.restart()
            learner.register(0, 0)
            learner.publish(0, tensors(0))
        assert batches == [[1, 2]] * 3
        assert train(learner, 0) == [1, 2]


def test_an_actor_that_vanishes_loses_its_groups_to_another(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=QUICK_LEASE_S)
    learner = learner_of(hub)
    with peers(learner):
        learner.publish(0, tensors(0))
        ghost = Actor(hub, "ghost")
        until(lambda: len(ghost.begun) == 2, ghost)
        ghost.client._connection.close()  # no Bye: as a killed process ends
        anna = Actor(hub)
        with peers(anna):
            until(lambda: len(anna.begun) == 2, anna)
            assert anna.begun == {0: 1, 1: 1}
            anna.put(0, 1)
            until(delivered(anna), anna)
            assert train(learner, 0) == [0, 1]
        status = hub.status()
        assert status["ledger"]["failed"] == 2
        assert "ghost" not in status["actors"]


def test_an_actor_whose_end_the_supervisor_saw_loses_its_groups_at_once(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=1000.0)
    learner = learner_of(hub)
    with peers(learner):
        learner.publish(0, tensors(0))
        ghost, anna = Actor(hub, "ghost"), Actor(hub, capacity=0)
        until(lambda: len(ghost.begun) == 2, ghost)
        ghost.client._connection.close()
        with peers(anna), hub.control() as operator:
            anna.capacity = 8
            operator.gone("ghost")
            until(lambda: len(anna.begun) == 2, anna)


def test_an_actor_that_was_silent_too_long_comes_back_with_what_it_holds(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=QUICK_LEASE_S)
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: len(anna.begun) == 2, anna)
        until(lambda: not hub.status()["actors"])
        anna.put(0)
        until(delivered(anna), anna)
        assert not anna.client.refused
        anna.put(1)
        until(delivered(anna), anna)
        assert train(learner, 0) == [0, 1]


def test_an_actor_that_was_cut_off_is_given_again_what_was_lost_on_the_way(place: Callable[..., Place]) -> None:
    """A frame over twice the limit cuts the connection: credits may be lost with it, and the actor says hello again."""
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=6), max_frame_bytes=CHUNK_BYTES, lease_s=1000.0)
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        for step in range(3):
            until(lambda: len(anna.begun) == 2, anna)
            if step == 1:
                anna.begun.clear()  # as if the credits had never come
                assert anna.client._link.send([b"x", bytes(3 * CHUNK_BYTES)])
                until(lambda: len(anna.begun) == 2, anna)
                assert set(anna.begun.values()) == {1}
            anna.put(*anna.begun)
            until(delivered(anna), anna)
            assert train(learner, step) == [2 * step, 2 * step + 1]


# What is no message


def answer_to(hub: Place, frames: list[bytes]) -> wire.Message:
    link = SocketLink(hub.address, "stranger")
    try:
        assert link.send(frames)
        answer = link.receive(DEADLINE_S) or link.receive(DEADLINE_S)  # the first may be the connection
        assert answer is not None
        return wire.decode(answer, max_frame_bytes=1 << 20)[1]
    finally:
        link.close()


def test_malformed_and_oversized_frames_are_counted_and_answered_and_the_hub_goes_on(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8), max_frame_bytes=CHUNK_BYTES)
    put = packing.pack_group(a_group(0, 0, 0, "anna"))
    malformed: list[list[bytes]] = [
        [b""],
        [b"junk"],
        [b"\x93" * 500_000],
        [bytes(CHUNK_BYTES + 1)],
        [*wire.encode(wire.Bye()), bytes(CHUNK_BYTES + 1)],
        [b"\xc1"] * 50,
    ]
    for count, frames in enumerate(malformed, 1):
        answer = answer_to(hub, frames)
        assert isinstance(answer, wire.Refused)
        assert answer.reason in ("malformed", "oversized")
        assert sum(hub.status()["refused"].values()) == count
    for message, reason in (
        (wire.Put(group=put[0]), "unknown-actor"),
        (wire.Beat(capacity=1, fence=1, version=1), "unknown-actor"),
        (wire.Bye(), "unknown-actor"),
        (wire.Fetch(fence=1, version=5), "weights"),
        (wire.FetchChunk(fence=1, version=5, index=1 << 60), "weights"),
        (wire.Take(fence=0, step=0), "unregistered"),
        (wire.Welcome(incarnation="x", max_frame_bytes=1), "unknown-type"),
        (wire.Register(step=1 << 60, committed=0, learner="a"), "unknown-step"),
    ):
        answer = answer_to(hub, wire.encode(message, put[1] if isinstance(message, wire.Put) else None))
        assert isinstance(answer, wire.Refused), answer
        assert answer.reason == reason
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)


def test_a_frame_that_cuts_the_peer_does_not_end_the_hub(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8), max_frame_bytes=CHUNK_BYTES)
    link = SocketLink(hub.address, "stranger")
    assert link.send([bytes(5 * CHUNK_BYTES)])
    until(link.was_remade)
    link.close()
    assert hub.status()["refused"] == {}  # it never came


def test_a_known_actor_with_a_group_that_contradicts_itself_is_refused_and_keeps_its_lease(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    learner = learner_of(hub)
    ghost = Connection(SocketLink(hub.address, "ghost"))
    with peers(learner, ghost):
        learner.publish(0, tensors(0))
        hello = wire.Hello(actor="ghost", life="1", capacity=1, fence=learner.fence, version=0)
        assert isinstance(ghost.ask(hello, timeout_s=DEADLINE_S)[0], wire.Welcome)
        header, arrays = packing.pack_group(a_group(0, 0, 0, "ghost"))
        for group, frames, reason in (
            (header, arrays[:1], "lengths"),
            (header, [arrays[0], np.full(6, np.nan, "<f4").tobytes()], "logprobs"),
            (header.model_copy(update={"num_tokens": []}), [arrays[0][:8], b""], "field"),
            (header.model_copy(update={"number": -5}), arrays, "field"),
        ):
            with pytest.raises(RefusedError, match=reason):
                ghost.ask(wire.Put(group=group), frames, timeout_s=DEADLINE_S)
        answer, _ = ghost.ask(wire.Put(group=header), arrays, timeout_s=DEADLINE_S)
        assert answer == wire.Ack(groups=[(0, 0)])
        assert hub.status()["refused"] == {"lengths": 1, "logprobs": 1, "field": 2}


def test_one_connection_that_says_hello_under_two_names_is_one_actor(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    ghost = Connection(SocketLink(hub.address, "ghost"))
    with peers(ghost):
        for name in ("ghost", "spook", "ghost"):
            ghost.ask(wire.Hello(actor=name, life="1", capacity=1, fence=0, version=-1), timeout_s=DEADLINE_S)
            assert list(hub.status()["actors"]) == [name]


def test_a_group_larger_than_the_hub_takes_is_refused_where_it_is_made(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        with pytest.raises(WireError, match="cannot be sent: the limits are"):
            anna.put(0, text="x" * wire.MAX_HEADER_BYTES)


# Weights


def test_a_corrupted_chunk_is_refused_and_the_old_version_stays_served(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    anna, learner = Actor(hub), learner_of(hub)
    raw = learner._connection
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        anna.put(0)
        until(delivered(anna), anna)
        assert taken(learner, 0) == [0]
        learner.trained(0)
        good = WeightSet.of(learner.fence, 1, tensors(1, size=CHUNK_BYTES + 9))
        raw.ask(good.announcement(), timeout_s=DEADLINE_S)
        raw.ask(wire.Chunk(fence=learner.fence, version=1, index=0), [good.chunk(0)], timeout_s=DEADLINE_S)
        spoiled = bytes([good.chunk(1)[0] ^ 1]) + good.chunk(1)[1:]
        with pytest.raises(RefusedError, match="weights: version 1: tensor 'w' is not what its digest says"):
            raw.ask(wire.Chunk(fence=learner.fence, version=1, index=1), [spoiled], timeout_s=DEADLINE_S)
        assert hub.status()["version"] == 0
        ben = Actor(hub, "ben")
        with peers(ben):
            until(lambda: ben.adopted, ben)
            assert ben.adopted == [(learner.fence, 0)]
            assert ben.tensors == anna.tensors
            learner.publish(1, tensors(1, size=CHUNK_BYTES + 9))
            until(lambda: anna.version == ben.version == 1, anna, ben)


def test_a_fetch_that_is_superseded_ends_with_the_newer_version(place: Callable[..., Place]) -> None:
    """Ben has the manifest of version 0 and asks for its chunks when they are gone already."""
    hub = place(Bound(1, 1, 8))
    size = 9 * CHUNK_BYTES
    anna, ben, learner = Actor(hub), Actor(hub, "ben", capacity=0), learner_of(hub)
    with peers(anna, ben, learner):
        learner.publish(0, tensors(0, size))
        ben.look()
        until(lambda: anna.begun, anna)
        anna.put(0)
        until(delivered(anna), anna)
        assert taken(learner, 0) == [0]
        learner.trained(0)
        learner.publish(1, tensors(1, size))
        until(lambda: ben.version == 1, ben)
        assert ben.tensors == {name: bytes(tensor.data) for name, tensor in tensors(1, size).items()}


def test_chunks_of_a_version_that_is_gone_are_refused(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    anna, learner = Actor(hub), learner_of(hub)
    ghost = Connection(SocketLink(hub.address, "ghost"))
    with peers(anna, learner, ghost):
        learner.publish(0, tensors(0))
        manifest, _ = ghost.ask(wire.Fetch(fence=1, version=0), timeout_s=DEADLINE_S)
        assert isinstance(manifest, wire.Manifest)
        until(lambda: anna.begun, anna)
        anna.put(0)
        until(delivered(anna), anna)
        train(learner, 0)
        with pytest.raises(RefusedError, match=r"weights: version 0 is not here; there are \[1\]"):
            ghost.ask(wire.FetchChunk(fence=1, version=0, index=0), timeout_s=DEADLINE_S)


def test_a_set_that_is_replaced_while_it_is_fetched_is_fetched_again(place: Callable[..., Place]) -> None:
    """A restored learner publishes the same version with other bits: no actor serves a mixture."""
    hub = place(Bound(1, 1, 8))
    size = 9 * CHUNK_BYTES
    anna, first = Actor(hub, weights=WeightsConfig(transport="chunks")), learner_of(hub)
    with peers(anna, first):
        first.publish(0, tensors(0, size))
        until(lambda: anna.client._weight_receiver._assembly is not None, anna)  # in the middle of it
        second = learner_of(hub)
        with peers(second):
            second.publish(0, tensors(99, size))
            until(lambda: anna.fence == second.fence, anna)
            assert anna.tensors["w"] == bytes(tensors(99, size)["w"].data)


def test_in_exact_mode_older_versions_are_served_again_after_a_restart(place: Callable[..., Place]) -> None:
    """Group 1 is of version 0, whenever it is made: its actor dies when version 1 is out, and then the hub."""
    hub = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4, exact=True), lease_s=QUICK_LEASE_S)
    ghost, learner = Actor(hub, "ghost"), learner_of(hub)
    with peers(learner):
        learner.publish(0, tensors(0))
        until(lambda: len(ghost.begun) == 2, ghost)
        ghost.put(0)
        until(delivered(ghost), ghost)
        assert train(learner, 0) == [0]
        ghost.client._connection.close()
        hub.restart()
        learner.register(1, 1)
        learner.publish(1, tensors(1))
        anna = Actor(hub)
        with peers(anna):
            for number in (1, 2, 3):
                until(holds(anna, number), anna)
                assert anna.version == number - 1
                anna.put(number)
                until(delivered(anna), anna)
                batch = learner.take(number)
                assert isinstance(batch, TakenBatch)
                assert [group.oldest_version for group in batch.groups] == [number - 1]
                learner.trained(number)
                learner.publish(number + 1, tensors(number + 1))


# The shell


def test_a_hub_that_cannot_listen_leaves_the_journal_to_the_next(tmp_path: Path, socket_dir: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        Hub(f"ipc://{socket_dir}/no/such/directory", tmp_path, QueueConfig(), Bound(1, 1, 1))
    Journal(tmp_path / "queue").close()


def test_two_hubs_do_not_share_a_directory(place: Callable[..., Place], socket_dir: Path) -> None:
    hub = place(Bound(1, 1, 1))
    with pytest.raises(JournalError, match="in use by another hub"):
        Hub(f"ipc://{socket_dir}/other", hub.folder, QueueConfig(), Bound(1, 1, 1))


def test_what_gone_actors_counted_stays_and_they_do_not(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    learner = learner_of(hub)
    with peers(learner):
        learner.publish(0, tensors(0))
        for index in range(5):
            ghost = Connection(SocketLink(hub.address, f"ghost{index}"))
            with peers(ghost):
                for message in (
                    wire.Hello(actor=f"ghost{index}", life="1", capacity=0, fence=0, version=-1),
                    wire.Beat(capacity=0, fence=0, version=-1, telemetry=wire.Telemetry(tokens_total=10.0, scoring=4.0)),
                    wire.Bye(),
                ):
                    ghost.ask(message, timeout_s=DEADLINE_S)
        assert hub.status()["actors"] == {}
        anna = Actor(hub)
        with peers(anna):
            until(lambda: anna.begun, anna)
            anna.put(0)
            until(delivered(anna), anna)
            batch = learner.take(0)
            assert isinstance(batch, TakenBatch)
            assert batch.telemetry["tokens_total"] == 53.0
            assert batch.telemetry.get("scoring", 0.0) == 0.0


def test_the_ends_of_a_run_leave_no_thread_behind(place: Callable[..., Place]) -> None:
    before = threading.active_count()
    hub = place(Bound(1, 0, 8))
    learner = learner_of(hub)
    learner.close()
    hub.close()
    assert threading.active_count() <= before
