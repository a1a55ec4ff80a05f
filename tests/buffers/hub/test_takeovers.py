"""Messages that come twice, learners that take over, and what a learner must have done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.clients.connection import HubRestartedError
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport.link import SocketLink
from tests.buffers.hub.place import (
    DEADLINE_S,
    Actor,
    Place,
    a_group,
    delivered,
    learner_of,
    peers,
    taken,
    tensors,
    train,
    until,
)


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
