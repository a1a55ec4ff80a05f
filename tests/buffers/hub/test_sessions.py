"""Actors come, go, are slow, stuck, doubled or of another run: real sockets, and never a group that pays for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from async_rlhf.buffers.clients.learner import SuspectGroup
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.packing import GroupSchema
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Rollout, SamplingMask, Score, Span
from async_rlhf.buffers.sampling import Sampling
from tests.buffers.hub.place import Place, a_group, come_back, delivered, holds, taken, train, until
from tests.conftest import kept_port

LEASE_S = 0.6


@pytest.fixture
def make(place: Callable[..., Place]) -> Callable[..., Place]:
    return partial(place, Bound(groups_per_batch=2, max_staleness=1, num_groups=8))


def no_group_paid(hub: Place) -> bool:
    ledger = hub.status()["ledger"]
    return bool(ledger["quarantined"] == 0 and ledger["closes"])


def test_of_two_living_actors_with_one_name_the_second_is_refused_and_the_first_goes_on(make: Callable[..., Place]) -> None:
    now = [0.0]
    hub = make(lease_s=LEASE_S, max_attempts=1, wanted={"clock": lambda: now[0]})
    first, learner = hub.actor(beat_s=0.0), hub.learner()

    def a_beat_later() -> bool:
        """Time goes on when the first was heard: a second in all, far beyond what a name is kept for in silence."""
        until(lambda: hub.status()["actors"]["anna"]["silent_s"] == 0.0, first)
        now[0] += 0.1
        return False

    until(holds(first, 0), first)
    second = hub.actor()
    with pytest.raises(RefusedError, match="name-taken: an actor called 'anna' is in the run"):
        until(a_beat_later, second)
    second.close()
    first.makes(*sorted(first.begun))
    assert taken(learner, 0) == [0, 1]
    assert no_group_paid(hub) and hub.status()["ledger"]["failed"] == 0


def test_an_actor_started_again_by_hand_gets_its_name_back_once_the_old_one_is_silent(make: Callable[..., Place]) -> None:
    hub = make(lease_s=60.0, max_attempts=1)
    first, _ = hub.actor(), hub.learner()
    until(holds(first, 0), first)
    first.vanish()
    second = hub.actor(beat_s=1.0)
    until(holds(second, 4), second)
    assert hub.status()["ledger"]["quarantined"] == 4, "the end of the first was seen: it counts"
    second.close()
    assert hub.status()["ledger"]["quarantined"] == 4, "and an orderly goodbye does not"


def test_an_actor_of_another_configuration_is_refused_by_name(make: Callable[..., Place]) -> None:
    shared = {"model": "a1", "tokenizer": "b1", "data": "c1"}
    hub = make(wanted={"shared": shared})
    for given, other in (({"model": "a1", "tokenizer": "XX"}, "data, tokenizer"), ({}, "data, model, tokenizer")):
        stranger = hub.actor("stranger", shared=given)
        with pytest.raises(RefusedError, match=f"shared: stranger and this run differ in: {other}"):
            until(lambda: False, stranger)
        stranger.close()
    friend = hub.actor("friend", shared=shared)
    until(lambda: "friend" in hub.status()["actors"], friend)


def test_a_hub_that_stood_still_for_longer_than_a_lease_ends_none(make: Callable[..., Place]) -> None:
    now = [0.0]
    hub = make(max_attempts=1, wanted={"clock": lambda: time.monotonic() + now[0]})
    anna, _ = hub.actor(), hub.learner()
    until(holds(anna, 0), anna)
    now[0] += 1000.0
    until(lambda: "anna" in hub.status()["actors"], anna)
    anna.makes(*sorted(anna.begun))
    assert not anna.client.refused and hub.status()["ledger"]["failed"] == 0


def test_beats_go_on_while_an_engine_loads_for_ten_leases(make: Callable[..., Place]) -> None:
    now = [0.0]
    hub = make(lease_s=LEASE_S, max_attempts=1, wanted={"clock": lambda: now[0]})
    _, anna = hub.learner(), hub.actor(beat_s=0.01)
    anna.client.keep_beating()
    until(holds(anna, 0), anna)
    while now[0] < 10 * LEASE_S:  # the actor's own thread is in `load_weights`
        until(lambda: hub.status()["actors"]["anna"]["silent_s"] == 0.0)
        now[0] += 0.1
    anna.makes(*sorted(anna.begun))
    assert not anna.client.refused and hub.status()["ledger"]["failed"] == 0


def test_a_group_without_progress_goes_to_another_although_its_actor_beats(make: Callable[..., Place]) -> None:
    now = [0.0]
    hub = make(progress_timeout_s=LEASE_S, wanted={"clock": lambda: now[0]})

    def later() -> bool:
        now[0] = min(now[0] + 0.2, 3.0)  # below a step that the hub forgives, and below a lease
        return bool(hub.status()["ledger"]["failed"] == 4)

    stuck, learner = hub.actor("stuck", beat_s=0.1), hub.learner()
    stuck.client.keep_beating()
    until(holds(stuck, 3), stuck)
    stuck.client.works_on(stuck.state)
    stuck.client.beat(stuck.state, wire.Telemetry(tokens_total=4.0))
    until(lambda: hub.status()["actors"]["stuck"]["tokens_total"] == 4.0)  # so the hub knows that it works on them
    until(later)  # then time stands still
    hub.actor("other").makes(0, 1, 2, 3)
    assert taken(learner, 0) == [0, 1] and no_group_paid(hub)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says how many bytes a connection has received")
def test_bytes_that_still_arrive_keep_a_lease(make: Callable[..., Place], stack: ExitStack) -> None:
    """A large group over a slow uplink, with the beats behind it."""
    port = stack.enter_context(kept_port())
    slow = SlowUplink(port)
    # The hub's time is what the uplink has passed on, so that a thread that stands still ends no lease.
    clock = {"clock": lambda: slow.passed / 400_000}
    hub = make(f"tcp://127.0.0.1:{port}", lease_s=LEASE_S, max_attempts=1, wanted=clock)
    anna, far = hub.actor(capacity=0), hub.actor("far", address=f"tcp://127.0.0.1:{slow.port}")
    hub.learner()
    until(holds(far, 0), far, anna)
    slow.bytes_per_s = 400_000
    far.put(0, text="x" * 600_000)  # of two rollouts: three seconds, five leases
    until(delivered(far), far, anna)
    assert not far.client.refused and hub.status()["ledger"]["failed"] == 0
    slow.close()


class SlowUplink:
    """A proxy before the hub that passes on what the peer sends at `bytes_per_s`, and what the hub sends at once."""

    def __init__(self, hub_port: int) -> None:
        self._hub_port, self.bytes_per_s, self.passed = hub_port, 1 << 30, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        try:
            while True:
                peer, _ = self._listener.accept()
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                hub = socket.create_connection(("127.0.0.1", self._hub_port))
                for way in ((peer, hub, True), (hub, peer, False)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()
        except OSError:
            pass

    def _pass(self, source: socket.socket, sink: socket.socket, slowly: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if slowly:
                    time.sleep(len(data) / self.bytes_per_s)  # what a slow link is
                sink.sendall(data)
                self.passed += len(data) if slowly else 0
        except OSError:
            pass
        finally:
            source.close()
            sink.close()


SCHEMA = GroupSchema(
    group_size=2,
    vocabulary=100,
    max_prompt_length=2,
    max_completion_length=3,
    rewards=frozenset({"right"}),
    sampling=Sampling(),
    environment=True,
)


def rollout(token: int = 5, length: int = 3, **changed: Any) -> Rollout:
    ids, logprobs = np.full(length, token, np.int32), np.full(length, -0.5, np.float32)
    fields = {"logprobs": logprobs, "spans": (Span(0, length),), "scores": {"right": Score(1.0)}}
    return Rollout(ids, finish_reason="stop", **fields | changed)


MASK = SamplingMask(np.array([1, 1, 2], np.int32), np.array([5, 5, 5, 777], np.int32))
ANEW = {"logprobs": np.full(2, -0.5, np.float32), "spans": (Span(0, 1), Span(None, 1, restarts=True), Span(0, 1))}
SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "one member instead of two": ({"rollouts": (rollout(),)}, "members: 1; this run's: 2"),
    "a token beyond the vocabulary": ({"rollouts": (rollout(100), rollout())}, "largest token id: 100; at most 99"),
    "a prompt token beyond it": ({"prompt_ids": np.array([1 << 20], np.int32)}, "largest token id: 1048576"),
    "a sampling mask beyond it": (
        {"rollouts": (rollout(sampling_mask=MASK), rollout())},
        "largest token id in a sampling mask: 777",
    ),
    "a reward that the run has not": (
        {"rollouts": (rollout(scores={"other": Score(1.0)}),) * 2},
        r"rewards: \['other'\]; this run's: \['right'\]",
    ),
    "a completion that is too long": ({"rollouts": (rollout(length=4), rollout())}, "tokens of a completion: 4; at most 3"),
    "a prompt that is too long": ({"prompt_ids": np.zeros(3, np.int32)}, "prompt tokens: 3; at most 2"),
    "a row that begins anew": (
        {"rollouts": (rollout(**ANEW), rollout())},
        "a row that begins anew; this run has environment.render other than 'split'",
    ),
    "another temperature": ({"sampling": Sampling(temperature=0.5)}, "sampling: temperature=0.5 top_k=0"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_group_that_the_learner_could_not_use_is_refused_at_the_door(make: Callable[..., Place], what: str) -> None:
    hub = make(wanted={"schema": SCHEMA})
    anna, _ = hub.actor(), hub.learner()
    changed, message = SPOILT[what]
    until(holds(anna, 0), anna)
    anna.client.put(replace(a_group(0, 0, 0, "anna"), **changed))
    with pytest.raises(RefusedError, match=f"schema: group 0: {message}"):
        until(lambda: False, anna)
    assert hub.status()["ledger"]["queued"] == 0


def test_a_defect_of_the_hub_refuses_the_message_that_met_it_and_no_other(
    make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = Exchange._put

    def broken(self: Exchange, identity: bytes, request: int, put: wire.Put, frames: wire.Frames) -> wire.Message | None:
        if put.group.number == 1:
            raise OverflowError("int too big to convert")
        return honest(self, identity, request, put, frames)

    monkeypatch.setattr(Exchange, "_put", broken)
    hub = make()
    anna, _ = hub.actor(), hub.learner()
    anna.makes(0)
    until(holds(anna, 1), anna)
    for _ in range(2):
        anna.client.put(a_group(1, 0, 0, "anna"))
        with pytest.raises(RefusedError, match="unforeseen: a defect of the hub: OverflowError"):
            until(lambda: False, anna)
    assert hub.status()["refused"] == {"unforeseen": 2} and hub.status()["ledger"]["queued"] == 1
    assert sum("OverflowError" in (record.exc_text or "") for record in caplog.records) == 1, "its traceback is logged once"


def test_a_batch_that_ends_learners_is_tried_group_by_group_and_goes_on_without_the_guilty_one(
    make: Callable[..., Place],
) -> None:
    hub = make(max_attempts=2)
    anna = hub.actor()
    learner = hub.learner()
    anna.makes(0, 1)
    for _ in range(2):
        assert taken(learner, 0) == [0, 1]
        learner = hub.learner()  # the one before ended with that batch
    first = learner.take(0)
    assert isinstance(first, SuspectGroup) and first.group().number == first.number == 0
    learner.tried(first)
    second = learner.take(0)
    assert isinstance(second, SuspectGroup) and second.number == 1
    learner.commit(0)  # its answer says that the hub knows of the trial, with which this learner ends
    assert train(hub.learner(), 0) == [0]
    assert hub.status()["ledger"]["quarantined"] == 1
    assert "ended the learner alone" in (hub.folder / "quarantine.jsonl").read_text()


def test_an_operator_takes_a_group_back_and_it_stays_so_when_the_hub_is_restarted(make: Callable[..., Place]) -> None:
    hub = make()
    anna, learner = hub.actor(), hub.learner()
    anna.makes(0, 1, 2, 3)
    with hub.control() as operator:
        operator.quarantine(1, "its answer key is wrong")
        with pytest.raises(RefusedError, match="trained: group 1"):
            operator.quarantine(1, "again")
    assert taken(learner, 0) == [0, 2]
    hub.restart()
    come_back(learner)
    assert taken(learner, 0) == [0, 2] and hub.status()["ledger"]["quarantined"] == 1
    assert "its answer key is wrong" in (hub.folder / "quarantine.jsonl").read_text()
