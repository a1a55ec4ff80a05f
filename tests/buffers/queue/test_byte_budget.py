"""Bytes that wait are bounded, and the bound never makes a learner wait."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready, entry


@given(seed=integers(0, 1 << 16))
def test_what_waits_stays_below_the_limit_and_the_run_ends(seed: int) -> None:
    """Two actors finish in any order; a group has 1 to 50 bytes, the limit is anything down to a single byte."""
    rng = Random(seed)
    batch, limit = rng.randint(1, 3), rng.randint(1, 200)
    hub = Ready(Bound(batch, rng.randint(2, 4), 24, window=rng.choice((1, 1, 3))), max_bytes=limit)
    for name in ("anna", "ben"):
        hub.join(name, capacity=6)
    largest, steps = 0, 0
    for _ in range(2000):
        hub.credits()
        leases = [(name, credit) for name, actor in hub.fleet.actors.items() for credit in actor.leases.values()]
        if leases:
            name, credit = rng.choice(leases)
            size = 1 + (credit.number * 7919) % 50
            try:
                hub.put(name, credit.number, entry(credit.attempt, hub.fleet.actors[name].version, num_bytes=size))
                largest = max(largest, size)
            except RefusedError as error:
                assert error.reason == "later"
        assert hub.room.queued <= limit + batch * largest
        assert hub.ledger.closes
        while hub.take(hub.step):
            hub.train()
            steps += 1
        if hub.at_end:
            assert steps * batch >= 24
            return
    raise AssertionError(f"no end after {steps} steps: {hub.ledger}")


def test_beyond_the_limit_only_what_the_next_batch_needs_is_begun_or_let_in() -> None:
    hub, large = Ready(Bound(groups_per_batch=2, max_staleness=3, num_groups=20), max_bytes=100), entry(num_bytes=90)
    hub.join(capacity=20)
    assert len(hub.credits()["anna"]) == 8  # nothing is known of sizes yet
    hub.put("anna", 5, large)
    for late in (4, 7):
        with pytest.raises(RefusedError, match=r"later: .* 100"):
            hub.put("anna", late, large)
    for due in (0, 1):
        hub.put("anna", due, large)
    assert hub.train() == [0, 1] and hub.ledger.leased == 5
    assert hub.credits() == {}, "seven groups of up to 90 bytes do not fit"
