"""Hubs that begin again, and actors that vanish, are silent, or come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.errors import HubRestartedError
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES
from tests.buffers.hub.place import QUICK_LEASE_S, Begun, Place, come_back, delivered, taken, tensors, train, until


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


def test_a_hub_restarted_again_and_again_offers_the_same_batches(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=2, num_groups=8, window=3), segment_bytes=1 << 12)
    anna.makes(2, 1)
    batches = []
    for _ in range(3):
        batches.append(taken(learner, 0))
        hub.restart()
        come_back(learner)
    assert batches == [[1, 2]] * 3
    assert train(learner, 0) == [1, 2]


def test_an_actor_that_vanishes_loses_its_groups_to_another(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=QUICK_LEASE_S)
    learner, ghost = hub.learner(), hub.actor("ghost")
    until(lambda: len(ghost.begun) == 2, ghost)
    ghost.vanish()
    anna = hub.actor()
    until(lambda: len(anna.begun) == 2, anna)
    assert anna.begun == {0: 1, 1: 1}
    anna.makes(0, 1)
    assert train(learner, 0) == [0, 1]
    status = hub.status()
    assert status["ledger"]["failed"] == 2
    assert "ghost" not in status["actors"]


def test_an_actor_whose_end_the_supervisor_saw_loses_its_groups_at_once(place: Callable[..., Place]) -> None:
    hub = place(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=1000.0)
    _, ghost, anna = hub.learner(), hub.actor("ghost"), hub.actor()
    until(lambda: len(ghost.begun) == 2, ghost)
    ghost.vanish()
    with hub.control() as operator:
        operator.gone("ghost")
    until(lambda: len(anna.begun) == 2, anna)


def test_an_actor_that_was_silent_too_long_comes_back_with_what_it_holds(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(groups_per_batch=2, max_staleness=0, num_groups=4), lease_s=QUICK_LEASE_S)
    until(lambda: len(anna.begun) == 2, anna)
    until(lambda: not hub.status()["actors"])
    anna.put(0)
    until(delivered(anna), anna)
    assert not anna.client.refused
    anna.makes(1)
    assert train(learner, 0) == [0, 1]


def test_an_actor_that_was_cut_off_is_given_again_what_was_lost_on_the_way(begun: Callable[..., Begun]) -> None:
    """A frame over twice the limit cuts the connection: credits may be lost with it, and the actor says hello again."""
    _, anna, learner = begun(
        Bound(groups_per_batch=2, max_staleness=0, num_groups=6), max_frame_bytes=CHUNK_BYTES, lease_s=1000.0
    )
    for step in range(3):
        until(lambda: len(anna.begun) == 2, anna)
        if step == 1:
            anna.begun.clear()  # as if the credits had never come
            assert anna.client._link.send([b"x", bytes(3 * CHUNK_BYTES)])
            until(lambda: len(anna.begun) == 2, anna)
            assert set(anna.begun.values()) == {1}
        anna.makes(*anna.begun)
        assert train(learner, step) == [2 * step, 2 * step + 1]
