"""A critic's loss, and advantages from its values, against twins and hand numbers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.model.critic import value_loss
from async_rlhf.learner.objective.advantages import gae, normalised, traced, v_trace

number = st.floats(-5, 5, width=32)
episodes = st.lists(st.tuples(number, number, st.floats(-3, 3, width=32)), min_size=1, max_size=8)
share = st.floats(0, 1)
cap = st.floats(0.2, 3)


def columns(steps: list[tuple[float, float, float]]) -> tuple[Float32Array, Float32Array, Float32Array]:
    rewards, values, log_ratios = (np.array(column, np.float32) for column in zip(*steps, strict=True))
    return rewards, values, log_ratios


def last_only(length: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(length) == length - 1


def near(values: object) -> object:
    return pytest.approx(values, rel=1e-3, abs=1e-3)


@given(episodes, share, share)
def test_gae_is_the_written_out_sum(steps: list[tuple[float, float, float]], gamma: float, lam: float) -> None:
    rewards, values, _ = columns(steps)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    assert advantages.tolist() == near(oracles.gae(rewards.tolist(), values.tolist(), gamma, lam))
    assert returns.tolist() == near((advantages + values).tolist())


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
    assert targets.tolist() == near(expected)
    after = [*expected[1:], 0.0]
    assert advantages.tolist() == near([r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)])
    assert mixed[1].tolist() == targets.tolist()
    behind = [lam * v2 + (1 - lam) * own for v2, own in zip(after, [*values[1:], 0.0], strict=True)]
    assert mixed[0].tolist() == near([r + gamma * q - v for r, v, q in zip(rewards, values, behind, strict=True)])


@given(episodes, share, share, cap, cap)
def test_the_traced_advantage_is_the_written_out_sum_and_moves_its_target_by_its_ratio(
    steps: list[tuple[float, float, float]], gamma: float, lam: float, rho: float, c: float
) -> None:
    rewards, values, logs = columns(steps)
    ends = last_only(len(rewards))
    advantages, targets = traced(rewards, values, logs, ends, gamma=gamma, lam=lam, rho_cap=rho, c_cap=c)
    ratios = [math.exp(x) for x in logs.tolist()]
    moved = [v + min(rho, r) * a for v, r, a in zip(values.tolist(), ratios, advantages.tolist(), strict=True)]
    assert targets.tolist() == near(moved)
    assert advantages.tolist() == near(oracles.traced(rewards.tolist(), values.tolist(), ratios, gamma, lam, c))


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
