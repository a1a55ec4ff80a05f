"""The divergence from the reference: estimates, and gradients that are exact in expectation over an enumerable policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rlhf.learner.objective.kl import Estimator, estimate, kl_loss, kl_penalty

P = torch.tensor([0.3, -0.2, 0.9, 0.0, -1.0], dtype=torch.float64)
Q = torch.tensor([-1.0, 0.7, 0.1, -0.5, 1.2], dtype=torch.float64)
BEHAVIOUR = torch.tensor([0.8, 0.1, 0.2, -0.6, 0.3], dtype=torch.float64)
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def exact() -> tuple[float, Tensor]:
    """KL(p | q) and its gradient in p's logits."""
    leaf = P.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1)
    divergence = (logp.exp() * (logp - torch.log_softmax(Q, -1))).sum()
    divergence.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return float(divergence.detach()), leaf.grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_estimator_over_the_policys_own_tokens_is_the_divergence(estimator: Estimator) -> None:
    logp, logq = torch.log_softmax(P, -1), torch.log_softmax(Q, -1)
    assert float((logp.exp() * estimate(logp, logq, estimator)).sum()) == pytest.approx(exact()[0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weighed_by_importance_the_gradient_is_exact_whoever_sampled(estimator: Estimator) -> None:
    leaf = P.clone().requires_grad_()
    behaviour = torch.log_softmax(BEHAVIOUR, -1)
    terms = kl_loss(torch.log_softmax(leaf, -1), behaviour, torch.log_softmax(Q, -1), estimator, cap=None)
    (behaviour.exp() * terms).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, exact()[1])


def test_unweighed_it_is_not() -> None:
    leaf = P.clone().requires_grad_()
    behaviour = torch.log_softmax(BEHAVIOUR, -1)
    (behaviour.exp() * estimate(torch.log_softmax(leaf, -1), torch.log_softmax(Q, -1), "k3")).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and not torch.allclose(leaf.grad, exact()[1], atol=1e-2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_penalty_on_a_reward_is_the_estimate(estimator: Estimator) -> None:
    logp, logq = torch.log_softmax(P, -1).float(), torch.log_softmax(Q, -1).float()
    found = kl_penalty(logp.numpy(), logq.numpy(), estimator)
    np.testing.assert_allclose(found, estimate(logp, logq, estimator).numpy(), rtol=1e-5, atol=1e-6)
