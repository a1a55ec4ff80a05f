"""The bound: what it refuses would hang, what it lets through runs, at the bound and never over it; and refill within it.

A learner may set a target below the bound: new groups stay within that, and the run goes on whatever it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready, entry


@dataclass(frozen=True)
class UncheckedBound(Bound):
    """The same arithmetic without the door, to see what the door keeps out."""

    def check(self) -> None:
        pass


def staleness_by_step(
    bound: Bound, targets: Sequence[int | None] = (None,), *, eager: bool = True, last_first: bool = False
) -> list[int]:
    """Largest staleness trained on at each step that a run reaches whose one actor is fast and never fails.

    The actor puts everything it was credited at once, with `last_first` the highest numbers first; an `eager` learner takes
    after every put, another when all is put. targets: by step, the last one on and on.
    """
    hub = Ready(bound)
    actor = hub.join(capacity=bound.num_groups)
    versions: dict[int, int] = {}
    found: list[int] = []

    def train() -> bool:
        step = hub.step
        if (batch := hub.take(step)) is None:
            return False
        found.append(max(step - versions[number] for number in batch))
        hub.trained(step)
        if hub.step % bound.publish_every == 0:
            hub.publish(hub.step)
            actor.version = hub.step
        return True

    moved = True
    while moved:
        hub.target_staleness = targets[min(hub.step, len(targets) - 1)]
        given = hub.give().get("anna", [])
        moved = bool(given)
        for number in sorted(given, reverse=last_first):
            versions[number] = actor.version
            hub.make(number)
            if eager:
                train()
            assert hub.ledger.leased + hub.ledger.queued <= bound.max_ahead
        moved |= train()
    return found


def lowest_staleness(bound: Bound) -> int:
    """The S that a refusal names, or the bound's own when it is not refused."""
    try:
        bound.check()
    except ConfigError as error:
        found = re.search(r"Lowest that can run: queue.max_staleness = (\d+)", str(error))
        assert found, error
        return int(found.group(1))
    return bound.max_staleness


SHAPES = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5, 8)))


@pytest.mark.parametrize(("groups_per_batch", "publish_every", "window"), SHAPES)
def test_what_is_refused_would_hang_and_the_lowest_named_does_not(
    groups_per_batch: int, publish_every: int, window: int
) -> None:
    def bound(max_staleness: int) -> UncheckedBound:
        num_groups = groups_per_batch * (3 * publish_every + 10) + 1
        return UncheckedBound(groups_per_batch, max_staleness, num_groups, publish_every, window)

    def checked(max_staleness: int) -> Bound:
        return Bound(groups_per_batch, max_staleness, 1, publish_every, window)

    lowest = lowest_staleness(checked(0))
    all_steps = -(-bound(0).num_groups // groups_per_batch)
    checked(lowest).check()
    for last_first in (False, True):
        found = staleness_by_step(bound(lowest), last_first=last_first)
        assert len(found) == all_steps
        assert max(found) <= lowest
    if lowest > 0:
        with pytest.raises(ConfigError, match=f"queue.max_staleness = {lowest - 1} would hang"):
            checked(lowest - 1).check()
        assert len(staleness_by_step(bound(lowest - 1))) < all_steps


def test_exact_mode_makes_each_group_by_its_version_and_needs_strict_order_and_every_version() -> None:
    for max_staleness in (0, 1, 3):
        found = staleness_by_step(Bound(2, max_staleness, 20, exact=True), eager=False)
        assert found == [min(step, max_staleness) for step in range(10)]
    for impossible in (Bound(2, 3, 10, window=2, exact=True), Bound(2, 3, 10, publish_every=2, exact=True)):
        with pytest.raises(ConfigError, match=r"queue.exact = true needs window = 1 and publish_every = 1"):
            impossible.check()


@pytest.mark.parametrize("target", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize(("publish_every", "window"), [(1, 1), (2, 1), (1, 5), (2, 9)])
def test_new_groups_stay_within_the_target_while_the_run_can_go_on(target: int | None, publish_every: int, window: int) -> None:
    bound = Bound(4, max_staleness=4, num_groups=64, publish_every=publish_every, window=window)
    found = staleness_by_step(bound, [target], eager=False)
    assert len(found) == 16, "the run must reach its end"
    within = 4 if target is None else min(4, max(target, bound.lowest_staleness))
    assert max(found) <= within
    if window == 1 and publish_every == 1:
        assert max(found) == within  # and what is allowed is used


def test_the_aim_moves_while_the_run_goes_on_and_what_is_begun_is_kept() -> None:
    bound = Bound(4, max_staleness=3, num_groups=96)
    found = staleness_by_step(bound, [None] * 6 + [0] * 8 + [None], eager=False)
    assert len(found) == 24
    assert found[5] == 3 and found[12] == 0 and found[23] == 3
    assert max(found) == 3


ENDLESS = 1 << 40


def ready(bound: Bound) -> Ready:
    hub = Ready(bound)
    hub.join(capacity=1000)
    return hub


def make(hub: Ready, constant: set[int] | None, random: Random | None = None) -> None:
    """Everything that can be begun is put, at once or in a random order; all is constant, or these numbers are."""
    anna = hub.fleet.actors["anna"]
    while True:
        hub.credits()
        if not (leased := sorted(anna.leases)):
            return
        number = random.choice(leased) if random else leased[0]
        made = entry(anna.leases[number].attempt, anna.version, num_tokens=3)
        hub.put("anna", number, made, constant=constant is None or number in constant)
        assert hub.ledger.closes


def test_what_is_behind_a_filtered_group_takes_its_place() -> None:
    hub = ready(Bound(2, 0, 6, refills=3, numbers=ENDLESS))
    for batch in ([1, 3], [6, 7], [8, 9]):
        make(hub, {0, 2, 4, 5})
        assert hub.train() == batch
    assert hub.at_end and hub.num_left == 0
    ledger = hub.ledger
    assert (ledger.credited, ledger.trained, ledger.filtered, ledger.tokens_filtered, ledger.tokens_put) == (10, 6, 4, 12, 30)


def test_where_everything_is_constant_the_cap_lets_batches_through() -> None:
    hub = ready(Bound(2, 0, 4, refills=2, numbers=ENDLESS))
    make(hub, None)
    assert hub.train() == [4, 5]  # of the batch's first 2 x 2 numbers none entered
    make(hub, None)
    assert hub.train() == [10, 11]
    assert hub.ledger.filtered == 8


@given(st.integers(1, 4), st.integers(1, 3), st.sets(st.integers(0, 40)), st.randoms(use_true_random=False))
def test_in_a_synchronous_run_the_order_of_puts_decides_nothing(
    groups_per_batch: int, refills: int, constant: set[int], random: Random
) -> None:
    bound = Bound(groups_per_batch, 0, 3 * groups_per_batch, refills=refills, numbers=ENDLESS)
    in_order, shuffled = ready(bound), ready(bound)
    for _ in range(3):
        make(in_order, constant)
        make(shuffled, constant, random)
        batch = in_order.train()
        assert batch == shuffled.train()
        assert len(batch) == groups_per_batch
    assert in_order.remember() == shuffled.remember()


def test_of_each_batch_only_so_many_are_filtered() -> None:
    bound = Bound(4, 0, 40, refills=2, numbers=ENDLESS)
    hub, random = ready(bound), Random(5)
    constant, first = {number for number in range(200) if random.random() < 0.8}, 0
    for _ in range(10):
        make(hub, constant)
        batch = hub.train()
        range_of_batch = set(range(first, batch[-1] + 1))
        assert range_of_batch - set(batch) == {n for n in range(first, first + 8) if n in constant and n < batch[-1]}
        first = batch[-1] + 1


def test_a_restarted_hub_knows_what_was_filtered_and_forgets_numbers_that_no_longer_matter() -> None:
    bound = Bound(2, 1, 40, refills=3, numbers=ENDLESS)
    hub = ready(bound)
    for step in range(1, 15):
        make(hub, set(range(0, 100, 3)))
        hub.train()
        hub.commit(step)
        state = hub.remember()
        assert len(state.filtered) <= 4, "what is remembered grows"
        again = Admission(bound)
        again.restore(state, hub._queued)
        assert again.remember() == state and again.num_filtered == hub.num_filtered
        assert again.num_left == hub.num_left and again.ledger.closes
    assert hub.num_filtered >= 14


def test_refill_is_refused_where_each_group_has_its_version() -> None:
    with pytest.raises(ConfigError, match=r"queue.exact = true with .*'refill'.*'drop'"):
        Admission(Bound(2, 1, 8, exact=True, refills=1))
