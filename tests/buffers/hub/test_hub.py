"""A real hub through whole steps: what is credited, consumed and counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from async_rlhf.buffers.clients.learner import TakenBatch
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from tests.buffers.hub.place import DEADLINE_S, Begun, Place, a_group, holds, taken, tensors, train, until


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


def test_a_learner_may_wait_before_the_first_actor_comes(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 0, 4))
    learner = hub.learner()
    waiting = hub.meanwhile(lambda: taken(learner, 0))
    until(lambda: hub.status()["waiting_for"] == "no actor has joined")
    hub.actor().makes(0, 1)
    assert waiting.result(DEADLINE_S) == [0, 1]


def test_without_staleness_the_next_step_is_credited_only_to_who_adopted_its_version(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=0, num_groups=6))
    until(lambda: anna.begun, anna)
    assert sorted(anna.begun) == [0, 1]
    anna.makes(0, 1)
    assert taken(learner, 0) == [0, 1]
    learner.trained(0)
    assert hub.status()["ledger"]["leased"] == 0
    anna.adopts = False
    learner.publish(1, tensors(1))
    until(lambda: anna.client.weights(), anna)  # fetched, but not adopted
    anna.look()
    assert hub.status()["ledger"]["leased"] == 0, "published, but no actor serves it"
    anna.fence, anna.version = learner.fence, 1
    until(lambda: anna.begun, anna)
    assert sorted(anna.begun) == [2, 3]


def test_the_data_ends_with_a_batch_of_what_is_left_and_everybody_is_told(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=1, num_groups=3))
    anna.makes(0, 1, 2)
    assert [train(learner, 0), train(learner, 1)] == [[0, 1], [2]]
    assert learner.take(2) == "finished"
    late = hub.actor("late")
    until(lambda: anna.client.stop_reason == late.client.stop_reason == "finished", anna, late)


def test_a_drain_finishes_what_is_begun_and_ends(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=1, num_groups=100))
    anna, learner = hub.actor(capacity=3), hub.learner()
    until(lambda: len(anna.begun) == 3, anna)
    with hub.control() as operator:
        operator.drain()
    assert hub.status()["state"] == "draining"
    anna.makes(0, 1)
    assert train(learner, 0) == [0, 1]
    ending = hub.meanwhile(lambda: learner.take(1))
    until(ending.done, anna)
    assert ending.result() == "drained"
    until(lambda: anna.client.stop_reason == "drained", anna)
    assert sorted(anna.begun) == [2], "nothing was credited after the drain"


def test_many_long_texts_make_a_batch(begun: Callable[..., Begun]) -> None:
    """Each group's header is within its limit; a batch of them is not one header."""
    _, anna, learner = begun(Bound(groups_per_batch=4, max_staleness=0, num_groups=4))
    anna.makes(0, 1, 2, 3, text="é" * (wire.MAX_HEADER_BYTES // 5))
    assert train(learner, 0) == [0, 1, 2, 3]


def test_a_hub_that_cannot_listen_leaves_the_journal_to_the_next(tmp_path: Path, socket_dir: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        Hub(f"ipc://{socket_dir}/no/such/directory", tmp_path, QueueConfig(), Bound(1, 1, 1))
    Journal(tmp_path / "queue").close()


def test_what_gone_actors_counted_stays_and_they_do_not(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    learner = hub.learner()
    for index in range(5):
        ghost = hub.stranger(f"ghost{index}")
        for message in (
            wire.Hello(actor=f"ghost{index}", life="1", capacity=0, fence=0, version=-1),
            wire.Beat(capacity=0, fence=0, version=-1, telemetry=wire.Telemetry(tokens_total=10.0, scoring=4.0)),
            wire.Bye(),
        ):
            ghost.ask(message, timeout_s=DEADLINE_S)
    assert hub.status()["actors"] == {}
    hub.actor().makes(0)
    batch = learner.take(0)
    assert isinstance(batch, TakenBatch)
    assert batch.telemetry["tokens_total"] == 53.0
    assert batch.telemetry.get("scoring", 0.0) == 0.0


def test_the_ends_of_a_run_leave_no_thread_behind(place: Callable[..., Place]) -> None:
    before = threading.active_count()
    hub = place(Bound(1, 0, 8))
    hub.learner(publishes=False)
    hub.close()
    assert threading.active_count() <= before


def test_a_learner_that_has_enough_stops_the_actors_and_no_group_is_blamed(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=1, num_groups=8), max_attempts=1)
    anna.makes(0, 1, 2)
    assert train(learner, 0) == [0, 1]
    learner.finish(1)
    until(lambda: anna.client.stop_reason, anna)
    assert anna.client.stop_reason == "finished"
    anna.close()
    with hub.control() as operator:
        operator.gone("anna")
    status = hub.status()
    assert status["state"] == "finished"
    ledger = status["ledger"]
    assert (ledger["trained"], ledger["queued"], ledger["leased"], ledger["quarantined"]) == (2, 1, 0, 0)
    assert ledger["credited"] == 3 + ledger["failed"] > 3
    hub.restart()
    again = hub.learner(1)
    hub.actor("bert").makes(3)
    assert taken(again, 1) == [2, 3], "what was ready is trained on when the run goes on"
