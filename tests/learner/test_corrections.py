"""Importance weights: finite whatever comes, cut above only, counted honestly. The divergence from the reference: estimates,
and gradients that are exact in expectation over an enumerable policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from async_rlhf.learner.objective.corrections import (
    MAX_LOG_RATIO,
    Estimator,
    effective_sample_size,
    estimate,
    interpolated,
    kl_loss,
    kl_penalty,
    ratio,
    second_moment_mask,
    truncated_weight,
)

logps = st.lists(st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=20)


def columns(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = zip(*pairs, strict=True)
    return torch.tensor(a), torch.tensor(b)


@given(logps, st.floats(0.1, 10))
def test_a_ratio_is_the_twin_and_a_weight_is_cut_above_and_never_raised(pairs: list[tuple[float, float]], cap: float) -> None:
    expected = [oracles.ratio(*pair) for pair in pairs]
    assert ratio(*columns(pairs)).tolist() == pytest.approx(expected, rel=1e-4)
    assert truncated_weight(*columns(pairs), cap).tolist() == pytest.approx([min(each, cap) for each in expected], rel=1e-4)


def test_a_ratio_beyond_all_measure_is_finite_and_so_is_its_gradient() -> None:
    logp = torch.tensor([-1e4, 1e4, 0.0, -3e38, 3e38], requires_grad=True)
    r = ratio(logp, torch.zeros(5))
    r.sum().backward()  # type: ignore[no-untyped-call]
    low, high = math.exp(-MAX_LOG_RATIO), math.exp(MAX_LOG_RATIO)
    torch.testing.assert_close(r.detach(), torch.tensor([low, high, 1.0, low, high]))
    assert logp.grad is not None and logp.grad.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


@given(st.lists(st.floats(math.exp(-20), math.exp(20)), min_size=1, max_size=30))
@example([0.3] * 29)  # equal weights waste nothing, but for rounding
@example([math.exp(20.0), *[math.exp(-20.0)] * 9])  # one above all others leaves one sample
def test_the_effective_sample_size_is_the_twin_and_a_share(weights: list[float]) -> None:
    found = float(effective_sample_size(torch.tensor(weights)))
    assert 0 < found <= 1
    assert found == pytest.approx(min(1.0, oracles.effective_sample_size(weights)), rel=1e-4)


log_ratios = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20, unique_by=abs)


@given(log_ratios, st.floats(1e-4, 4))
def test_the_second_moment_mask_is_the_twin_and_leaves_the_moment_below_its_limit(drawn: list[float], limit: float) -> None:
    kept = second_moment_mask(np.array(drawn, np.float32), limit)
    assert kept.tolist() == oracles.second_moment_mask(drawn, limit)
    assert not kept.any() or float(np.mean(np.square(np.array(drawn)[kept]))) <= limit * (1 + 1e-6)
    with_nan = second_moment_mask(np.array([*drawn, math.nan], np.float32), limit)
    assert with_nan.tolist() == [*kept.tolist(), True], "what is not a number is not hidden"


def test_the_interpolated_policy_lies_between_the_other_two_by_the_age_of_each_token() -> None:
    current, behaviour = torch.tensor([-1.0] * 5, requires_grad=True), torch.tensor([-3.0] * 5)
    found = interpolated(current, behaviour, torch.tensor([0, 1, 2, 4, -2]))
    # a version behind it is behaviour itself; two behind, half of the way; ages from the future count by their distance
    torch.testing.assert_close(found, torch.tensor([-3.0, -3.0, -2.0, -1.5, -2.0]))
    assert not found.requires_grad


P = torch.tensor([0.3, -0.2, 0.9, 0.0, -1.0], dtype=torch.float64)
Q = torch.tensor([-1.0, 0.7, 0.1, -0.5, 1.2], dtype=torch.float64)
SAMPLED_BY = torch.tensor([0.8, 0.1, 0.2, -0.6, 0.3], dtype=torch.float64)
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def exact() -> tuple[float, Tensor]:
    """KL(p | q) and its gradient in p's logits."""
    leaf = P.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1)
    divergence = (logp.exp() * (logp - torch.log_softmax(Q, -1))).sum()
    divergence.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(divergence.detach()), leaf.grad


def gradient_of(terms: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the mean over `SAMPLED_BY` in P's logits."""
    leaf = P.clone().requires_grad_()
    (torch.log_softmax(SAMPLED_BY, -1).exp() * terms(torch.log_softmax(leaf, -1))).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimate_has_the_divergence_as_its_mean_and_weighed_by_importance_its_gradient(estimator: Estimator) -> None:
    logp, logq, behaviour = (torch.log_softmax(each, -1) for each in (P, Q, SAMPLED_BY))
    divergence, gradient = exact()
    found = estimate(logp, logq, estimator)
    assert (float((logp.exp() * found).sum()) == pytest.approx(divergence)) == (estimator != "k2")
    torch.testing.assert_close(gradient_of(lambda now: kl_loss(now, behaviour, logq, estimator, cap=None)), gradient)
    assert not torch.allclose(gradient_of(lambda now: estimate(now, logq, estimator)), gradient, atol=1e-2), "unweighed"
    np.testing.assert_allclose(kl_penalty(logp.float().numpy(), logq.float().numpy(), estimator), found, rtol=1e-5, atol=1e-6)
