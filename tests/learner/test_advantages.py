"""Advantages against their twin, and the laws every caller relies on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from async_rlhf.learner.config import AdvantageConfig
from async_rlhf.learner.objective.advantages import (
    best,
    constant,
    drop_constant,
    group_relative,
    leave_one_out,
    pair,
    reinforce_pp,
)

rewards = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))
groups = st.lists(st.one_of(st.none(), rewards), min_size=1, max_size=12)
stds = st.sampled_from(["sample", "population"])
of_tokens = st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=5)


def near(values: list[float | None]) -> list[object]:
    return [value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9) for value in values]


@given(groups, st.booleans(), stds)
def test_it_is_the_twin(values: list[float | None], scale_by_std: bool, std: Any) -> None:
    expected = oracles.group_relative(values, scale_by_std=scale_by_std, std=std)
    assert group_relative(values, scale_by_std=scale_by_std, std=std) == near(expected)


@given(st.lists(rewards, min_size=2, max_size=12))
def test_by_default_a_group_is_scaled_as_torch_std_does_in_trl_and_verl(values: list[float]) -> None:
    assume(max(values) - min(values) > 0.01)
    scores = torch.tensor(values, dtype=torch.float64)
    found = group_relative(values, scale_by_std=True, std=AdvantageConfig().std)
    assert found == near(((scores - scores.mean()) / scores.std()).tolist())


@given(groups, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(values: list[float | None], scale_by_std: bool, random: object) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_relative(values, scale_by_std=scale_by_std, std="sample")
    shuffled = group_relative([values[i] for i in order], scale_by_std=scale_by_std, std="sample")
    assert shuffled == near([straight[i] for i in order])


@given(groups, st.booleans(), st.integers(0, 12))
def test_a_failed_member_moves_nobody_elses_advantage(values: list[float | None], scale_by_std: bool, where: int) -> None:
    without = group_relative(values, scale_by_std=scale_by_std, std="sample")
    where = min(where, len(values))
    with_failure = group_relative([*values[:where], None, *values[where:]], scale_by_std=scale_by_std, std="sample")
    assert with_failure == [*without[:where], None, *without[where:]]


@given(groups, st.booleans())
def test_advantages_sum_to_zero(values: list[float | None], scale_by_std: bool) -> None:
    counting = [value for value in group_relative(values, scale_by_std=scale_by_std, std="sample") if value is not None]
    assert math.fsum(counting) == pytest.approx(0.0, abs=1e-6)


@given(st.lists(rewards, min_size=2, max_size=8), st.floats(0.1, 1000), rewards)
def test_scaled_by_std_the_unit_of_the_reward_does_not_matter(values: list[float], unit: float, zero: float) -> None:
    assume(max(values) - min(values) > 0.01)
    shifted = group_relative([unit * value + zero for value in values], scale_by_std=True, std="sample")
    plain = group_relative(values, scale_by_std=True, std="sample")
    assert shifted == [pytest.approx(value, rel=1e-6, abs=1e-6) for value in plain]


@given(rewards, st.integers(1, 10), st.booleans())
def test_a_constant_group_says_nothing(reward: float, size: int, scale_by_std: bool) -> None:
    assert group_relative([reward] * size, scale_by_std=scale_by_std, std="sample") == [0.0] * size


def test_one_survivor_has_nobody_to_be_better_than() -> None:
    assert group_relative([None, 5.0, None], scale_by_std=True, std="sample") == [None, 0.0, None]
    assert group_relative([None, None], scale_by_std=True, std="sample") == [None, None]


def test_an_example_by_hand() -> None:
    # mean 1, squares 1 + 1 + 0 + 4 + 4 = 10: variance 10 / 4 of the sample, 10 / 5 of the population
    rewards = [0.0, 2.0, None, 1.0, 3.0, -1.0]
    assert group_relative(rewards, scale_by_std=False, std="sample") == [-1.0, 1.0, None, 0.0, 2.0, -2.0]
    for std, variance in (("sample", 10 / 4), ("population", 10 / 5)):
        root = math.sqrt(variance)
        expected = near([-1 / root, 1 / root, None, 0.0, 2 / root, -2 / root])
        assert group_relative(rewards, scale_by_std=True, std=std) == expected  # type: ignore[arg-type]


def test_a_reward_too_large_to_square_is_still_ranked() -> None:
    assert group_relative([1e200, 0.0], scale_by_std=True, std="population") == near([1.0, -1.0])


@given(groups)
def test_leave_one_out_is_the_twin(values: list[float | None]) -> None:
    assert leave_one_out(values) == near(oracles.leave_one_out(values))


@given(groups, st.integers(0, 11), rewards)
def test_the_baseline_of_a_completion_does_not_contain_its_own_reward(
    values: list[float | None], where: int, reward: float
) -> None:
    where = where % len(values)
    assume(values[where] is not None and sum(value is not None for value in values) > 1)
    raised = [*values[:where], reward, *values[where + 1 :]]
    before, after, old = leave_one_out(values)[where], leave_one_out(raised)[where], values[where]
    assert before is not None and after is not None and old is not None
    assert after - before == pytest.approx(reward - old, abs=1e-9)


def normalised_over_the_batch(completions: list[list[float]], gamma: float, over: Any) -> list[list[float]]:
    ends = np.cumsum([len(own) for own in completions])
    end_N = np.isin(np.arange(ends[-1]), ends - 1)
    reward_N = np.concatenate([np.array(own, np.float32) for own in completions])
    found = reinforce_pp(reward_N, end_N, gamma=gamma, batch_statistics=over)
    return [own.tolist() for own in np.split(found, ends[:-1])]


@given(of_tokens, st.floats(0, 1), st.sampled_from(["tokens", "completions"]))
def test_normalised_over_the_batch_is_the_twin(completions: list[list[float]], gamma: float, over: str) -> None:
    expected = oracles.reinforce_pp(completions, gamma, over)
    for found, wanted in zip(normalised_over_the_batch(completions, gamma, over), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_over_tokens_a_completion_counts_as_often_as_it_has_tokens() -> None:
    long_good, short_bad = [0.0, 0.0, 1.0], [0.0]
    # returns 1, 1, 1 and 0: mean 3/4, variance 3/16; of the completions mean 1/2, variance 1/4
    root = math.sqrt(3)
    assert normalised_over_the_batch([long_good, short_bad], 1.0, "tokens") == [
        pytest.approx([1 / root] * 3), pytest.approx([-root])
    ]  # fmt: skip
    assert normalised_over_the_batch([long_good, short_bad], 1.0, "completions") == [[1.0] * 3, [-1.0]]
    assert normalised_over_the_batch([[0.5], [0.0, 0.5]], 1.0, "tokens") == [[0.0], [0.0, 0.0]]  # constant


@given(groups)
def test_a_pair_is_the_best_and_the_worst_that_count(values: list[float | None]) -> None:
    chosen = [value for value in pair(values) if value is not None]
    counting = [value for value in values if value is not None]
    if constant(values):
        assert chosen == []
    else:
        assert sorted(chosen) == [min(counting), max(counting)]
    assert [value for value in best(values) if value is not None] == ([] if constant(values) else [max(counting)])


def test_constant_groups_are_dropped_whole_and_the_others_kept() -> None:
    batch = [[1.0, 1.0], [0.0, 1.0], [None, 2.0], [None, None]]
    assert drop_constant(batch) == [[None, None], [0.0, 1.0], [None, None], [None, None]]
