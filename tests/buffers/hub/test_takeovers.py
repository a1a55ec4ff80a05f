"""Messages that come twice, learners that take over, and what a learner must have done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.errors import HubRestartedError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import DEADLINE_S, Begun, Place, a_group, come_back, taken, tensors, train, until


def test_a_put_for_what_another_actor_holds_is_superseded(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8))
    anna, ben, _ = hub.actor(capacity=2), hub.actor("ben", capacity=2), hub.learner()
    until(lambda: len(anna.begun) == len(ben.begun) == 2, anna, ben)
    stolen = next(iter(ben.begun))
    anna.client.put(a_group(stolen, 0, 0, "anna"))
    until(lambda: anna.client.refused, anna)
    assert list(anna.client.refused) == [(stolen, "superseded")]
    ben.makes(stolen)
    assert hub.status()["ledger"]["queued"] == 1


def test_a_registration_that_was_sent_twice_is_one(place: Callable[..., Place]) -> None:
    """What a learner does that asks while the hub is away."""
    hub = place(Bound(2, 1, 8))
    link = hub.stranger("learner").link
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
    assert fences[0] == fences[1] == hub.status()["fence"]


def test_a_second_learner_takes_over_and_the_first_is_told(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 8))
    anna, first = hub.actor(), hub.learner()
    anna.makes(0, 1)
    assert train(first, 0) == [0]
    assert taken(first, 1) == [1]
    second = hub.learner()
    for call in (
        lambda: first.take(1),
        lambda: first.publish(1, {}),
        lambda: first.commit(1),
        lambda: first.register(1, 0),
    ):
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


def test_a_learner_out_of_step_is_told(place: Callable[..., Place]) -> None:
    learner = place(Bound(1, 1, 8)).learner(publishes=False)
    for call in (lambda: learner.take(1), lambda: learner.commit(1), lambda: learner.publish(3, tensors(3))):
        with pytest.raises(RefusedError, match="order"):
            call()
    with pytest.raises(RefusedError, match="unknown-step"):
        learner.register(5, 5)


@pytest.mark.parametrize("goes_on", ["take", "publish", "commit"])
def test_who_goes_on_has_trained_on_the_batch_before_whatever_was_lost(begun: Callable[..., Begun], goes_on: str) -> None:
    hub, anna, learner = begun(Bound(1, 1, 8))
    anna.makes(0, 1)
    assert taken(learner, 0) == [0]
    if goes_on == "publish":
        learner.publish(1, tensors(1))
    elif goes_on == "commit":
        learner.commit(1)
    assert taken(learner, 1) == [1]
    assert hub.status()["ledger"]["trained"] == 1
