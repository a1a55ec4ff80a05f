"""Advantages from rewards and from a critic's values, and the critic's loss: against twins and numbers by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.config import AdvantageConfig
from async_rlhf.learner.model.critic import value_loss
from async_rlhf.learner.objective.advantages import (
    best,
    constant,
    drop_constant,
    gae,
    group_relative,
    leave_one_out,
    normalised,
    pair,
    reinforce_pp,
    traced,
    v_trace,
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


number = st.floats(-5, 5, width=32)
episodes = st.lists(st.tuples(number, number, st.floats(-3, 3, width=32)), min_size=1, max_size=8)
share = st.floats(0, 1)
cap = st.floats(0.2, 3)


def columns(steps: list[tuple[float, float, float]]) -> tuple[Float32Array, Float32Array, Float32Array]:
    rewards, values, log_ratios = (np.array(column, np.float32) for column in zip(*steps, strict=True))
    return rewards, values, log_ratios


def last_only(length: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(length) == length - 1


def close(values: object) -> object:
    return pytest.approx(values, rel=1e-3, abs=1e-3)


@given(episodes, share, share)
def test_gae_is_the_written_out_sum(steps: list[tuple[float, float, float]], gamma: float, lam: float) -> None:
    rewards, values, _ = columns(steps)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    assert advantages.tolist() == close(oracles.gae(rewards.tolist(), values.tolist(), gamma, lam))
    assert returns.tolist() == close((advantages + values).tolist())


@given(episodes, share, share, cap, cap)
def test_v_trace_is_equation_one_of_the_paper(
    steps: list[tuple[float, float, float]], gamma: float, lam: float, rho: float, c: float
) -> None:
    rewards, values, logs = columns(steps)
    settings = {"gamma": gamma, "lam": lam, "rho_cap": rho, "c_cap": c}
    advantages, targets = v_trace(rewards, values, logs, last_only(len(rewards)), **settings, bootstrap="target")
    mixed = v_trace(rewards, values, logs, last_only(len(rewards)), **settings, bootstrap="mixed")
    ratios = [math.exp(x) for x in logs.tolist()]
    expected = oracles.v_trace(rewards.tolist(), values.tolist(), ratios, gamma, lam, rho, c)
    assert targets.tolist() == close(expected)
    after = [*expected[1:], 0.0]
    assert advantages.tolist() == close([r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)])
    assert mixed[1].tolist() == targets.tolist()
    behind = [lam * v2 + (1 - lam) * own for v2, own in zip(after, [*values[1:], 0.0], strict=True)]
    assert mixed[0].tolist() == close([r + gamma * q - v for r, v, q in zip(rewards, values, behind, strict=True)])


@given(episodes, share, share, cap, cap)
def test_the_traced_advantage_is_the_written_out_sum_and_moves_its_target_by_its_ratio(
    steps: list[tuple[float, float, float]], gamma: float, lam: float, rho: float, c: float
) -> None:
    rewards, values, logs = columns(steps)
    ends = last_only(len(rewards))
    advantages, targets = traced(rewards, values, logs, ends, gamma=gamma, lam=lam, rho_cap=rho, c_cap=c)
    ratios = [math.exp(x) for x in logs.tolist()]
    moved = [v + min(rho, r) * a for v, r, a in zip(values.tolist(), ratios, advantages.tolist(), strict=True)]
    assert targets.tolist() == close(moved)
    assert advantages.tolist() == close(oracles.traced(rewards.tolist(), values.tolist(), ratios, gamma, lam, c))


def test_v_trace_by_hand() -> None:
    # two tokens, reward 1 at the end, gamma 1, lam 1, caps 1; ratios 2 and 1/2; values 0.5 and 0.2
    rewards, values = np.array([0, 1], np.float32), np.array([0.5, 0.2], np.float32)
    logs = np.log(np.array([2, 0.5], np.float32))
    settings = {"gamma": 1.0, "lam": 1.0, "rho_cap": 1.0, "c_cap": 1.0, "bootstrap": "target"}
    advantages, targets = v_trace(rewards, values, logs, last_only(2), **settings)  # type: ignore[arg-type]
    # v_2 = 0.2 + 0.5 (1 + 0 - 0.2) = 0.6;  v_1 = 0.5 + 1 (0 + 0.2 - 0.5) + 1 (0.6 - 0.2) = 0.6
    assert targets.tolist() == pytest.approx([0.6, 0.6])
    # A_1 = 0 + 0.6 - 0.5, A_2 = 1 + 0 - 0.2
    assert advantages.tolist() == pytest.approx([0.1, 0.8])


@pytest.mark.parametrize("estimate", [partial(v_trace, bootstrap="mixed"), partial(v_trace, bootstrap="target"), traced])
@given(one=episodes, two=episodes)
def test_two_episodes_in_one_trace_are_the_two_apart(
    estimate: object, one: list[tuple[float, float, float]], two: list[tuple[float, float, float]]
) -> None:
    settings = {"gamma": 0.9, "lam": 0.8, "rho_cap": 1.5, "c_cap": 1.0}
    ends = np.concatenate([last_only(len(one)), last_only(len(two))])
    together = estimate(*columns([*one, *two]), ends, **settings)  # type: ignore[operator]
    apart = [estimate(*columns(each), last_only(len(each)), **settings) for each in (one, two)]  # type: ignore[operator]
    for which in (0, 1):
        assert np.array_equal(together[which], np.concatenate([each[which] for each in apart]))


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_normalised_advantages_have_mean_0_and_deviation_1_or_are_constant(values: list[float]) -> None:
    found = normalised(np.array(values, np.float32)).astype(np.float64)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-3) or float(found.std()) < 1e-5


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=10), st.none() | st.floats(0.05, 2))
def test_the_loss_of_a_value_is_the_twin(drawn: list[tuple[float, float, float]], clip: float | None) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    expected = [oracles.value_loss(*row, clip) for row in drawn]
    assert value_loss(value, old, target, clip).tolist() == [pytest.approx(each, abs=1e-9) for each in expected]


def test_a_value_that_has_moved_beyond_the_clip_towards_its_target_is_pulled_no_further() -> None:
    value = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    value_loss(value, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), clip=0.2).sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None
    # moved 0.5 towards 1: stop; moved 0.5 away from -1: back; moved 0.1: on
    assert value.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])
