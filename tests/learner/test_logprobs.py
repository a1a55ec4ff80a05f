"""Log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from learner.logprobs import token_entropy, token_logprobs


@pytest.fixture
def logits_NV() -> torch.Tensor:
    return 5 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))


TARGET_N = torch.tensor([0, 10, 3, 3, 7, 1, 5])
TEMPERATURE_N = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7, 10.0, 1.5])


def test_they_are_those_of_the_tempered_distribution_of_each_token(logits_NV: torch.Tensor) -> None:
    expected = Categorical(logits=logits_NV / TEMPERATURE_N[:, None])
    torch.testing.assert_close(token_logprobs(logits_NV, TARGET_N, TEMPERATURE_N), expected.log_prob(TARGET_N))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(token_entropy(logits_NV, TEMPERATURE_N), expected.entropy())  # type: ignore[no-untyped-call]


def test_they_are_float32_whatever_the_model_computes_in(logits_NV: torch.Tensor) -> None:
    half = logits_NV.bfloat16()
    logps = token_logprobs(half, TARGET_N, TEMPERATURE_N)
    assert logps.dtype == token_entropy(half, TEMPERATURE_N).dtype == torch.float32
    # rounded once, on the way in, and not again: equal to float32 arithmetic on the rounded logits
    assert torch.equal(logps, token_logprobs(half.float(), TARGET_N, TEMPERATURE_N))


def test_logits_of_any_size_give_finite_numbers_and_gradients() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]], requires_grad=True)
    target, temperature = torch.tensor([1, 1]), torch.ones(2)
    logps = token_logprobs(logits, target, temperature)
    logps.sum().backward()  # type: ignore[no-untyped-call]
    assert logps.tolist() == [-2e4, 0.0]
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())
    assert token_entropy(logits.detach(), temperature).tolist() == [0.0, 0.0]


def test_a_masked_token_of_the_vocabulary_has_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    torch.testing.assert_close(token_entropy(logits, torch.ones(1)), torch.tensor([2.0]).log())


def test_only_the_log_probability_carries_a_gradient(logits_NV: torch.Tensor) -> None:
    logits_NV.requires_grad_()
    assert token_logprobs(logits_NV, TARGET_N, TEMPERATURE_N).requires_grad
    assert not token_entropy(logits_NV, TEMPERATURE_N).requires_grad
