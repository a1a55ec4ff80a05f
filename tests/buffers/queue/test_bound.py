"""The bound: what it refuses would hang, and what it lets through runs, at the bound and never over it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Entry

ACTOR = "actor"


@dataclass(frozen=True)
class UncheckedBound(Bound):
    """The same arithmetic without the door, to see what the door keeps out."""

    def check(self) -> None:
        pass


def steps_done(bound: Bound, *, last_first: bool = False) -> tuple[int, int]:
    """Steps a run reaches whose one actor is fast and never fails, and the largest staleness it trained on.

    The actor puts everything it was credited at once; `last_first` puts the highest numbers first, and the learner
    takes after every put.
    """
    admission = Admission(bound)
    admission.fleet.join(ACTOR, Actor(capacity=bound.num_groups, fence=1, version=0, heard_at=0.0))
    admission.register(1, 0, 0)
    admission.publish(0)
    oldest = 0
    versions: dict[int, int] = {}

    def train() -> bool:
        nonlocal oldest
        step = admission.step
        if (batch := admission.take(step)) is None:
            return False
        oldest = max([oldest, *(step - versions[number] for number in batch)])
        admission.trained(step)
        if (step + 1) % bound.publish_every == 0:
            admission.publish(step + 1)
            admission.fleet.actors[ACTOR].version = step + 1
        return True

    moved = True
    while moved:
        credits = [credit for given in admission.credits().values() for credit in given]
        moved = bool(credits)
        for credit in sorted(credits, key=lambda credit: credit.number, reverse=last_first):
            version = versions[credit.number] = admission.fleet.actors[ACTOR].version
            admission.put(ACTOR, credit.number, Entry(credit.attempt, version, version, 1))
            moved |= train()
            assert admission.ledger.leased + admission.ledger.queued <= bound.max_ahead
        moved |= train()
    return admission.step, oldest


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
        steps, oldest = steps_done(bound(lowest), last_first=last_first)
        assert steps == all_steps
        assert oldest <= lowest
    if lowest > 0:
        with pytest.raises(ConfigError, match=f"queue.max_staleness = {lowest - 1} would hang"):
            checked(lowest - 1).check()
        assert steps_done(bound(lowest - 1))[0] < all_steps


@pytest.mark.parametrize("max_staleness", range(4))
def test_in_strict_order_the_bound_is_reached_and_not_passed(max_staleness: int) -> None:
    _, oldest = steps_done(Bound(2, max_staleness, num_groups=40), last_first=True)
    assert oldest == max_staleness


def test_exact_mode_needs_strict_order_and_every_version() -> None:
    Bound(2, 1, 10, exact=True).check()
    for impossible in (Bound(2, 3, 10, window=2, exact=True), Bound(2, 3, 10, publish_every=2, exact=True)):
        with pytest.raises(ConfigError, match=r"queue.exact = true needs window = 1 and publish_every = 1"):
            impossible.check()


def test_without_staleness_nothing_of_the_next_step_begins_before_its_version() -> None:
    bound = Bound(groups_per_batch=3, max_staleness=0, num_groups=12)
    admission = Admission(bound)
    admission.fleet.join(ACTOR, Actor(capacity=100, fence=1, version=0, heard_at=0.0))
    admission.register(1, 0, 0)
    for step in range(4):
        admission.publish(step)
        admission.fleet.actors[ACTOR].version = step
        credits = admission.credits()[ACTOR]
        assert [credit.number for credit in credits] == list(range(3 * step, 3 * step + 3))
        for credit in credits:
            assert admission.credits() == {}
            admission.put(ACTOR, credit.number, Entry(0, step, step, 1))
        assert admission.take(step) == [credit.number for credit in credits]
        assert admission.credits() == {}
        admission.trained(step)
        assert admission.credits() == {}  # trained, but its version is not published
    assert admission.at_end
