"""Bytes that wait are bounded, and the bound never makes a learner wait."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis.strategies import integers

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Entry


@given(seed=integers(0, 1 << 16))
def test_what_waits_stays_below_the_limit_and_the_run_ends(seed: int) -> None:
    """Two actors finish in any order; a group has 1 to 50 bytes, the limit is anything down to a single byte."""
    rng = Random(seed)
    batch, limit = rng.randint(1, 3), rng.randint(1, 200)
    bound = Bound(batch, rng.randint(2, 4), 24, window=rng.choice((1, 1, 3)))
    hub = Admission(bound, max_bytes=limit)
    hub.register(1, 0, 0)
    hub.publish(0)
    for name in ("anna", "ben"):
        hub.fleet.join(name, Actor(capacity=6, fence=1, version=0, heard_at=0.0))
    largest, steps = 0, 0
    for _ in range(2000):
        hub.credits()
        leases = [(name, credit) for name, actor in hub.fleet.actors.items() for credit in actor.leases.values()]
        if leases:
            name, credit = rng.choice(leases)
            size = 1 + (credit.number * 7919) % 50
            try:
                hub.put(
                    name,
                    credit.number,
                    Entry(credit.attempt, hub.fleet.actors[name].version, hub.fleet.actors[name].version, 1, size),
                )
                largest = max(largest, size)
            except RefusedError as error:
                assert error.reason == "later"
        assert hub.room.queued <= limit + bound.groups_per_batch * largest
        assert hub.ledger.closes
        while hub.take(hub.step):
            hub.trained(hub.step)
            steps += 1
            hub.publish(hub.step)
            for actor in hub.fleet.actors.values():
                actor.version = hub.step
        if hub.at_end:
            assert steps * batch >= 24
            return
    raise AssertionError(f"no end after {steps} steps: {hub.ledger}")


def test_beyond_the_limit_only_what_the_next_batch_needs_is_begun_or_let_in() -> None:
    hub = Admission(Bound(groups_per_batch=2, max_staleness=3, num_groups=20), max_bytes=100)
    hub.register(1, 0, 0)
    hub.publish(0)
    hub.fleet.join("anna", Actor(capacity=20, fence=1, version=0, heard_at=0.0))
    assert len(hub.credits()["anna"]) == 8  # nothing is known of sizes yet
    hub.put("anna", 5, Entry(0, 0, 0, 1, 90))
    for late in (4, 7):
        try:
            hub.put("anna", late, Entry(0, 0, 0, 1, 90))
        except RefusedError as error:
            assert error.reason == "later" and "100" in error.detail
    for due in (0, 1):
        hub.put("anna", due, Entry(0, 0, 0, 1, 90))
    assert hub.take(0) == [0, 1] and hub.ledger.leased == 5
    hub.trained(0)
    hub.publish(1)
    hub.fleet.actors["anna"].version = 1
    assert hub.credits() == {}, "seven groups of up to 90 bytes do not fit"
