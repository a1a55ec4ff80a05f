"""The bound: what it refuses would hang, and what it lets through runs, at the bound and never over it.

A learner may set a target below it: new groups stay within that, and the run goes on whatever it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready


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


def test_exact_mode_needs_strict_order_and_every_version() -> None:
    Bound(2, 1, 10, exact=True).check()
    for impossible in (Bound(2, 3, 10, window=2, exact=True), Bound(2, 3, 10, publish_every=2, exact=True)):
        with pytest.raises(ConfigError, match=r"queue.exact = true needs window = 1 and publish_every = 1"):
            impossible.check()


@pytest.mark.parametrize("target", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize(("publish_every", "window"), [(1, 1), (2, 1), (1, 5), (2, 9)])
def test_new_groups_stay_within_the_target_as_far_as_the_run_can_go_on(
    target: int | None, publish_every: int, window: int
) -> None:
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
