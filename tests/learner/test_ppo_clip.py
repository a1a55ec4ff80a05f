"""The loss against its twin, and against what it is meant to estimate."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.loss import LossInputs
from async_rlhf.learner.objective.objective import objective

logp = st.floats(-12, 0, width=32)
tokens = st.lists(st.tuples(logp, logp, logp, st.floats(-5, 5, width=32)), min_size=1, max_size=20)
configs = st.builds(
    LossConfig,
    clip_low=st.floats(0.05, 0.9),
    clip_high=st.floats(0.05, 3.0),
    dual_clip=st.floats(1.5, 10.0),
    is_cap=st.one_of(st.none(), st.floats(0.5, 5.0)),
)


def inputs_of(current: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor) -> LossInputs:
    """Tokens that are a completion and a group each."""
    each = torch.arange(len(current))
    return LossInputs(current, proximal, behaviour, advantage, sequence_N=each, group_S=each, staleness_N=each * 0)


def make_inputs(rows: list[tuple[float, float, float, float]]) -> LossInputs:
    current, proximal, behaviour, advantage = (torch.tensor(column) for column in zip(*rows, strict=True))
    return inputs_of(current.requires_grad_(), proximal, behaviour, advantage)


def gradient(rows: list[tuple[float, float, float, float]], config: LossConfig) -> list[float]:
    """d loss / d log p_current, per token."""
    inputs = make_inputs(rows)
    objective(inputs, config).total.backward()  # type: ignore[no-untyped-call]
    assert inputs.logp_current_N.grad is not None
    found: list[float] = inputs.logp_current_N.grad.tolist()
    return found


@given(tokens, configs)
def test_it_is_the_twin_token_by_token(rows: list[tuple[float, float, float, float]], config: LossConfig) -> None:
    expected = [oracles.ppo_clip(*row, config) for row in rows]
    for row, loss in zip(rows, expected, strict=True):
        assert float(objective(make_inputs([row]), config).total.detach()) == pytest.approx(loss, rel=1e-3, abs=1e-5)
    size = sum(map(abs, expected))
    assert float(objective(make_inputs(rows), config).total.detach()) == pytest.approx(
        sum(expected), rel=1e-3, abs=1e-5 + 1e-5 * size
    )


@given(tokens, configs, st.integers(0, 20))
def test_the_micro_batches_sum_to_the_whole(
    rows: list[tuple[float, float, float, float]], config: LossConfig, cut: int
) -> None:
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    assert [each for part in parts for each in gradient(part, config)] == gradient(rows, config)
    whole = objective(make_inputs(rows), config)
    cut_up = [objective(make_inputs(part), config) for part in parts]
    size = sum(abs(oracles.ppo_clip(*row, config)) for row in rows)
    assert sum(float(out.total.detach()) for out in cut_up) == pytest.approx(
        float(whole.total.detach()), rel=1e-4, abs=1e-6 * (1 + size)
    )
    for name, value in whole.sums.items():
        assert sum(float(out.sums[name]) for out in cut_up) == pytest.approx(float(value), rel=1e-5)


def test_outside_the_clip_region_nothing_pulls_further() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.3, is_cap=None)
    rows = [
        (0.3, 0.0, 0.0, 1.0),  # r = 1.35, liked already: no more
        (-0.3, 0.0, 0.0, -1.0),  # r = 0.74, disliked already: no less
        (0.3, 0.0, 0.0, -1.0),  # r = 1.35 though disliked: pulled back
        (-0.3, 0.0, 0.0, 1.0),  # r = 0.74 though liked: pulled back
        (0.2, 0.0, 0.0, 1.0),  # r = 1.22, inside
    ]
    found = gradient(rows, config)
    assert found[:2] == [0.0, 0.0]
    assert found[2] > 0 > found[3] and found[4] < 0
    assert objective(make_inputs(rows), config).sums["clip_ratio/region_mean"] == 2


def test_a_disliked_token_that_became_likely_costs_at_most_the_dual_clip() -> None:
    config = LossConfig(dual_clip=3.0, is_cap=None)
    row = (0.0, -1e4, 0.0, -2.0)
    assert float(objective(make_inputs([row]), config).total.detach()) == pytest.approx(3.0 * 2.0)
    assert gradient([row], config) == [0.0]


def test_without_a_cap_all_weights_are_one() -> None:
    rows = [(-1.0, -1.0, behaviour, 1.5) for behaviour in (-9.0, -1.0, -0.1)]
    assert gradient(rows, LossConfig(is_cap=None)) == [-1.5] * 3


def test_log_ratios_beyond_all_measure_give_finite_gradients() -> None:
    extremes = [-1e4, 0.0, 1e4]
    rows = [(c, p, b, a) for c in extremes for p in extremes for b in extremes for a in (-1.0, 0.0, 1.0)]
    out = objective(make_inputs(rows), LossConfig(is_cap=2.0))
    assert bool(torch.isfinite(out.total))
    assert bool(torch.isfinite(torch.tensor(gradient(rows, LossConfig(is_cap=2.0)))).all())


# A softmax policy over five actions, small enough to enumerate.
REWARDS = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
CURRENT = torch.tensor([0.3, -0.2, 0.9, 0.0, -1.0], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-1.0, 0.7, 0.1, -0.5, 1.2], dtype=torch.float64)


def expected_gradient(is_cap: float | None) -> Tensor:
    """Sum over all actions of p_behaviour(a) times the gradient of the loss of a, negated: the ascent direction."""
    logits = CURRENT.clone().requires_grad_()
    current, behaviour = torch.log_softmax(logits, -1), torch.log_softmax(BEHAVIOUR, -1)
    # each action is a token of its own, weighted by how often the behaviour policy takes it: A = p_b(a) R(a)
    inputs = inputs_of(current, current.detach(), behaviour, behaviour.exp() * REWARDS)
    objective(inputs, LossConfig(is_cap=is_cap)).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return -logits.grad


def weighted_policy_gradient(weights: Tensor) -> Tensor:
    """Closed form for a tabular softmax: sum_a p_b(a) w(a) R(a) (onehot(a) - p)."""
    p, p_behaviour = torch.softmax(CURRENT, -1), torch.softmax(BEHAVIOUR, -1)
    return ((p_behaviour * weights * REWARDS)[:, None] * (torch.eye(5, dtype=torch.float64) - p)).sum(0)


def importance() -> Tensor:
    return torch.softmax(CURRENT, -1) / torch.softmax(BEHAVIOUR, -1)


@pytest.mark.parametrize("cap", [0.2, 0.8, 2.0, 5.0])
def test_at_the_start_of_a_step_it_is_the_truncated_importance_weighted_policy_gradient(cap: float) -> None:
    torch.testing.assert_close(expected_gradient(cap), weighted_policy_gradient(importance().clamp(max=cap)))


def test_untruncated_it_is_in_expectation_the_exact_on_policy_gradient() -> None:
    logits = CURRENT.clone().requires_grad_()
    (torch.softmax(logits, -1) * REWARDS).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    torch.testing.assert_close(expected_gradient(1e9), logits.grad, rtol=0, atol=1e-6)
    # and the correction is what makes it so
    assert not torch.allclose(expected_gradient(None), logits.grad, atol=1e-2)
