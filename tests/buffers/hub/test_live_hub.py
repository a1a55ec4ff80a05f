"""A real hub at a real socket, with the clients' own code at the other ends: whole steps, restarts, takeovers, slow links."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from async_rlhf.buffers.clients.learner import SuspectGroup, TakenBatch, WeightUpload
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.errors import HubRestartedError, RefusedError
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES
from tests.buffers.hub.place import (
    DEADLINE_S,
    Begun,
    Place,
    a_group,
    come_back,
    delivered,
    holds,
    shout,
    taken,
    tensors,
    train,
    until,
)


@pytest.fixture
def make(place: Callable[..., Place]) -> Callable[..., Place]:
    return partial(place, Bound(groups_per_batch=2, max_staleness=1, num_groups=8))


def test_one_step_through_every_message(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=1, num_groups=8))
    until(lambda: anna.begun, anna)
    assert anna.adopted == [(learner.fence, 0)]
    assert anna.tensors == {name: bytes(tensor.data) for name, tensor in tensors(0).items()}
    assert anna.begun == {0: 0, 1: 0, 2: 0, 3: 0}
    anna.makes(1, 0)
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
    until(holds(anna, 5), anna)
    assert anna.adopted[-1] == (learner.fence, 1)
    learner.commit(1)
    status = hub.status()
    assert (status["step"], status["committed_step"], status["version"], status["state"]) == (1, 1, 1, "running")
    ledger = status["ledger"]
    assert (ledger["credited"], ledger["trained"], ledger["committed"], ledger["leased"]) == (6, 2, 2, 4)
    assert ledger["tokens_trained"] == 12
    hub.end()
    assert json.loads((hub.folder / "ledger.json").read_text())["ledger"]["trained"] == 2


def test_a_hub_that_cannot_listen_leaves_the_journal_to_the_next(tmp_path: Path, socket_dir: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        Hub(f"ipc://{socket_dir}/no/such/directory", tmp_path, QueueConfig(), Bound(1, 1, 1))
    Journal(tmp_path / "queue").close()


def test_the_ends_of_a_run_leave_no_thread_behind(place: Callable[..., Place]) -> None:
    before = threading.active_count()
    hub = place(Bound(1, 0, 8))
    hub.learner(publishes=False)
    hub.close()
    assert threading.active_count() <= before


# -- what dies and comes back


def test_a_restarted_hub_loses_nothing_and_trains_nothing_twice(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=1, num_groups=12))
    until(lambda: len(anna.begun) == 4, anna)
    anna.makes(0, 1)
    seen = taken(learner, 0)
    learner.trained(0)
    anna.makes(2)

    hub.end()
    anna.put(3)  # while no hub runs
    anna.look()
    hub.begin()
    until(delivered(anna), anna)
    assert not anna.client.refused, "the group made for the hub that died is not thrown away"
    with pytest.raises(HubRestartedError):
        learner.publish(1, tensors(1))
    come_back(learner, 1)
    seen += train(learner, 1)
    while len(seen) < 12:
        anna.makes(len(seen), len(seen) + 1)
        seen += train(learner, len(seen) // 2)
    assert seen == list(range(12))
    ledger = hub.status()["ledger"]
    assert (ledger["trained"], ledger["stale"], ledger["failed"]) == (12, 0, 0)


def test_an_actor_that_was_cut_off_is_given_again_what_was_lost_on_the_way(begun: Callable[..., Begun]) -> None:
    """A frame over twice the limit cuts the connection: credits may be lost with it, and the actor says hello again."""
    _, anna, learner = begun(Bound(2, 0, 6), max_frame_bytes=CHUNK_BYTES, lease_s=1000.0)
    for step in range(3):
        until(lambda: len(anna.begun) == 2, anna)
        if step == 1:
            anna.begun.clear()  # as if the credits had never come
            assert anna.client._link.send([b"x", bytes(3 * CHUNK_BYTES)])
            until(lambda: len(anna.begun) == 2, anna)
            assert set(anna.begun.values()) == {1}
        anna.makes(*anna.begun)
        assert train(learner, step) == [2 * step, 2 * step + 1]


def test_a_second_learner_takes_over_and_the_first_is_told(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    anna, first = hub.actor(), hub.learner()
    anna.makes(0, 1)
    assert train(first, 0) == [0]
    assert taken(first, 1) == [1]
    second = hub.learner()
    for call in (lambda: first.take(1), lambda: first.publish(1, {}), lambda: first.commit(1), lambda: first.register(1, 0)):
        with pytest.raises(RefusedError, match="fenced: fence 1 is over: another learner holds 2"):
            call()
    hub.restart()
    for late in (lambda: first.take(1), lambda: first.register(1, 0)):
        with pytest.raises(RefusedError, match="fenced"):
            late()
    with pytest.raises(HubRestartedError, match="unregistered"):
        second.take(0)
    come_back(second)
    assert second.fence == 3
    assert [train(second, 0), train(second, 1)] == [[0], [1]], "the same batches again"
    assert hub.status()["ledger"]["trained"] == 2


def test_a_batch_that_ends_learners_is_tried_group_by_group_and_goes_on_without_the_guilty_one(make: Any) -> None:
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


# -- weights that are on their way


class Gate:
    """Publications begin when it is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def begin(self, work: Callable[[], None]) -> WeightUpload:
        def late() -> None:
            assert self.opened.wait(DEADLINE_S)
            work()

        return WeightUpload(late)


def test_the_next_batch_is_taken_meanwhile_and_its_step_counts_when_the_set_is_there(place: Callable[..., Place]) -> None:
    hub, gate = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4)), Gate()
    anna, learner = hub.actor(), hub.learner(start=gate.begin)
    anna.makes(0, 1)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    gate.opened.clear()
    publication = learner.begin_publish(1, tensors(1))
    assert taken(learner, 1) == [1], "made by version 0, which the bound allows"
    assert hub.status()["version"] == 0
    finishing = hub.meanwhile(lambda: learner.trained(1))
    gate.opened.set()
    finishing.result(DEADLINE_S)
    publication.check()
    assert hub.status()["version"] == 1, "step 2 is not counted before version 1 is whole"
    learner.begin_publish(2, tensors(2))
    until(lambda: anna.version == 2, anna)
    assert anna.tensors == {name: bytes(tensor.data) for name, tensor in tensors(2).items()}


def test_a_learner_that_waits_for_its_batch_hears_of_a_refused_set_and_of_a_restarted_hub(place: Callable[..., Place]) -> None:
    hub, gate = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4)), Gate()
    learner = hub.learner(start=gate.begin)
    gate.opened.clear()
    learner.begin_publish(0, tensors(1))  # of this version there is a set already: the hub wants no other
    hub.restart()
    taking = hub.meanwhile(lambda: learner.take(0))
    with pytest.raises(HubRestartedError):
        taking.result(DEADLINE_S)
    gate.opened.set()
    come_back(learner)

    learner.begin_publish(3, tensors(3))
    with pytest.raises(RefusedError, match="done 0 steps and cannot publish version 3"):
        learner.take(0)
    come_back(learner)


# -- slow links, strangers


def test_messages_in_a_dialect_that_does_not_tell_its_connection_are_refused_or_answered_like_any_other(make: Any) -> None:
    """A greeting of ZMTP 1.0 without an identity, and messages behind their length and a flag."""
    hub = make()
    for text in (b"oops", bytes(4), b"\xff" * 4):
        shout(hub.address, b"\x01\x00", bytes([len(text) + 1, 0]) + text)
    until(lambda: hub.status()["refused"].get("malformed", 0) == 3)
    header = wire.encode(wire.GetStatus(), request=3)[0]
    shout(hub.address, b"\x01\x00", bytes([len(header) + 1, 0]) + header)
    assert sum(hub.status()["refused"].values()) == 3
