"""A learner may set a target below the bound: new groups stay within it, and the run goes on whatever it is."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Entry

ACTOR = "actor"


def staleness_by_step(bound: Bound, targets: list[int | None]) -> list[int]:
    """Largest staleness trained on at each step, with one fast actor; `targets` by step, the last one on and on."""
    admission = Admission(bound)
    admission.fleet.join(ACTOR, Actor(capacity=bound.num_groups, fence=1, version=0, heard_at=0.0))
    admission.register(1, 0, 0)
    admission.publish(0)
    versions: dict[int, int] = {}
    found: list[int] = []
    moved = True
    while moved:
        moved = False
        step = admission.step
        admission.target_staleness = targets[min(step, len(targets) - 1)]
        for credit in [credit for given in admission.credits().values() for credit in given]:
            version = versions[credit.number] = admission.fleet.actors[ACTOR].version
            admission.put(ACTOR, credit.number, Entry(credit.attempt, version, version, 1))
            moved = True
        if (batch := admission.take(step)) is not None:
            found.append(max(step - versions[number] for number in batch))
            admission.trained(step)
            if (step + 1) % bound.publish_every == 0:
                admission.publish(step + 1)
                admission.fleet.actors[ACTOR].version = step + 1
            moved = True
    return found


@pytest.mark.parametrize("target", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize(("publish_every", "window"), [(1, 1), (2, 1), (1, 5), (2, 9)])
def test_new_groups_stay_within_the_target_as_far_as_the_run_can_go_on(
    target: int | None, publish_every: int, window: int
) -> None:
    bound = Bound(4, max_staleness=4, num_groups=64, publish_every=publish_every, window=window)
    found = staleness_by_step(bound, [target])
    assert len(found) == 16, "the run must reach its end"
    within = 4 if target is None else min(4, max(target, bound.lowest_staleness))
    assert max(found) <= within
    if window == 1 and publish_every == 1:
        assert max(found) == within  # and what is allowed is used


def test_the_aim_moves_while_the_run_goes_on_and_what_is_begun_is_kept() -> None:
    bound = Bound(4, max_staleness=3, num_groups=96)
    found = staleness_by_step(bound, [None] * 6 + [0] * 8 + [None])
    assert len(found) == 24
    assert found[5] == 3 and found[12] == 0 and found[23] == 3
    assert max(found) == 3


def test_in_exact_mode_an_aim_changes_nothing() -> None:
    bound = Bound(4, max_staleness=2, num_groups=40, exact=True)
    assert all(bound.allows(5, number, target_staleness=0) == bound.allows(5, number) for number in range(40))
