"""Advantages against their twin, and the laws every caller relies on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import assume, example, given
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
@example([0.1] * 7, True, "sample")  # all equal, but for rounding
@example([None, 5.0, None], True, "sample")
@example([None, None], False, "population")
@example([1e200, 0.0], True, "population")  # too large to square
def test_it_is_the_twin(values: list[float | None], scale_by_std: bool, std: Any) -> None:
    expected = oracles.group_relative(values, scale_by_std=scale_by_std, std=std)
    assert group_relative(values, scale_by_std=scale_by_std, std=std) == near(expected)


@given(st.lists(rewards, min_size=2, max_size=12))
def test_by_default_a_group_is_scaled_as_torch_std_does_in_trl_and_verl(values: list[float]) -> None:
    assume(max(values) - min(values) > 0.01)
    scores = torch.tensor(values, dtype=torch.float64)
    found = group_relative(values, scale_by_std=True, std=AdvantageConfig().std)
    assert found == near(((scores - scores.mean()) / scores.std()).tolist())


def test_an_example_by_hand() -> None:
    # mean 1, squares 1 + 1 + 0 + 4 + 4 = 10: variance 10 / 4 of the sample, 10 / 5 of the population
    rewards = [0.0, 2.0, None, 1.0, 3.0, -1.0]
    assert group_relative(rewards, scale_by_std=False, std="sample") == [-1.0, 1.0, None, 0.0, 2.0, -2.0]
    for std, variance in (("sample", 10 / 4), ("population", 10 / 5)):
        root = math.sqrt(variance)
        expected = near([-1 / root, 1 / root, None, 0.0, 2 / root, -2 / root])
        assert group_relative(rewards, scale_by_std=True, std=std) == expected  # type: ignore[arg-type]


@given(groups)
def test_leave_one_out_is_the_twin(values: list[float | None]) -> None:
    assert leave_one_out(values) == near(oracles.leave_one_out(values))


def normalised_over_the_batch(completions: list[list[float]], gamma: float, over: Any) -> list[list[float]]:
    ends = np.cumsum([len(own) for own in completions])
    end_N = np.isin(np.arange(ends[-1]), ends - 1)
    reward_N = np.concatenate([np.array(own, np.float32) for own in completions])
    found = reinforce_pp(reward_N, end_N, gamma=gamma, batch_statistics=over)
    return [own.tolist() for own in np.split(found, ends[:-1])]


@given(of_tokens, st.floats(0, 1), st.sampled_from(["tokens", "completions"]))
@example([[0.5], [0.0, 0.5]], 1.0, "tokens")  # returns that are all equal
def test_normalised_over_the_batch_is_the_twin(completions: list[list[float]], gamma: float, over: str) -> None:
    expected = oracles.reinforce_pp(completions, gamma, over)
    for found, wanted in zip(normalised_over_the_batch(completions, gamma, over), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)


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
