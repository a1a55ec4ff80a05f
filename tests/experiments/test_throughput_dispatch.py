"""The count of decode steps under each order of waiting requests."""

from __future__ import annotations

import numpy as np
import pytest

from async_rlhf.experiments.throughput.dispatch import ORDERS, Setting, Work, compare, simulate

LENGTHS = np.array([[1], [1], [1], [3]])
WORK = Work(LENGTHS, LENGTHS.mean(axis=1))


def test_steps_are_counted_from_the_submission_of_a_group_and_from_batch_to_batch() -> None:
    setting = Setting(slots=2, staleness=0, queued_groups=2, group_size=1, groups_per_batch=4)
    submitted, known = (simulate(setting, WORK, ORDERS[name]) for name in ("submitted", "known"))
    assert (submitted.group.tolist(), submitted.batch.tolist()) == ([1, 1, 2, 4], [4])
    assert (known.group.tolist(), known.batch.tolist()) == ([1, 2, 3, 3], [3])
    assert (submitted.busy, known.busy) == (6 / 8, 6 / 6)


def test_without_staleness_no_group_begins_before_the_batch_before_is_whole() -> None:
    setting = Setting(slots=4, staleness=0, group_size=1, groups_per_batch=2)
    assert simulate(setting, WORK, ORDERS["submitted"]).batch.tolist() == [1, 3]
    ahead = Setting(slots=4, staleness=1, group_size=1, groups_per_batch=2)
    assert simulate(ahead, WORK, ORDERS["submitted"]).batch.tolist() == [1, 2]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_no_order_loses_a_group_or_lets_it_end_sooner_than_its_longest_member(name: str, staleness: int) -> None:
    setting = Setting(slots=16, staleness=staleness)
    work = Work.draw(5 * setting.groups_per_batch, setting.group_size, seed=3)
    outcome = simulate(setting, work, ORDERS[name])
    assert (outcome.group >= work.lengths.max(axis=1)).all() and len(outcome.batch) == 5
    assert 0 < outcome.busy <= 1


def test_all_orders_are_given_the_same_work() -> None:
    first, again = (compare(Setting(16, 1), batches=3, seeds=2) for _ in range(2))
    assert first.keys() == again.keys() == ORDERS.keys()
    assert all((found.batch == again[name].batch).all() for name, found in first.items())
