"""Log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

from async_rlhf.learner.model.chunks import chunk_tokens, tokens_within
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_entropy, token_logprobs


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


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [7, 5], an output layer [11, 5] and its bias [11]."""
    random = torch.Generator().manual_seed(1)
    return tuple(2 * torch.randn(*shape, generator=random) for shape in ((7, 5), (11, 5), (11,)))  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("remembered", [0, 3, 7])
@pytest.mark.parametrize("biased", [True, False])
def test_in_chunks_they_and_their_gradients_are_those_of_the_whole(
    layer: tuple[torch.Tensor, ...], rows: int, biased: bool, remembered: int
) -> None:
    def both(chunked: bool) -> list[torch.Tensor]:
        hidden, weight, bias = (
            each.to(torch.float32 if chunked else torch.float64, copy=True).requires_grad_() for each in layer
        )
        if chunked:
            given = hidden, weight, bias if biased else None, TARGET_N, TEMPERATURE_N, rows
            logp, entropy = chunked_logprobs(*given, remembered=remembered)
        else:
            exact = Categorical(logits=(hidden @ weight.T + (bias if biased else 0)) / TEMPERATURE_N[:, None])
            logp, entropy = exact.log_prob(TARGET_N), exact.entropy()  # type: ignore[no-untyped-call]
        (logp * torch.arange(7) - 0.3 * entropy * torch.arange(7).flip(0)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad for each in (hidden, weight, bias) if each.grad is not None]
        return [each.float() for each in (logp.detach(), entropy.detach(), *gradients)]

    found, expected = both(True), both(False)
    assert len(found) == len(expected) == (5 if biased else 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_in_chunks_of_half_precision_the_gradient_of_the_layer_is_summed_in_float32(layer: tuple[torch.Tensor, ...]) -> None:
    hidden, weight = (each.clone().requires_grad_() for each in layer[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = chunked_logprobs(hidden, weight, None, TARGET_N, TEMPERATURE_N, 2)
    logp.sum().backward()  # type: ignore[no-untyped-call]
    exact = token_logprobs(layer[0] @ layer[1].T, TARGET_N, TEMPERATURE_N)
    assert logp.dtype == torch.float32 and weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(logp, exact, rtol=0.02, atol=0.2)


def test_in_chunks_logits_of_any_size_give_finite_numbers_and_gradients() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 1e30, 0.0], [float("-inf"), 0.0, 0.0]])
    for row, logp, entropy in zip(logits, [-2e4, 0.0, -0.6931472], [0.0, 0.0, 0.6931472], strict=True):
        hidden = torch.zeros(1, 2, requires_grad=True)
        given = torch.tensor([1]), torch.ones(1), 1
        found = chunked_logprobs(hidden, torch.ones(3, 2), row, *given)
        (found[0] + found[1]).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.cat(found).tolist() == pytest.approx([logp, entropy])
        assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())


def test_no_tokens_have_no_log_probabilities_and_give_no_gradient(layer: tuple[torch.Tensor, ...]) -> None:
    hidden, weight = layer[0][:0].clone().requires_grad_(), layer[1].clone().requires_grad_()
    logp, entropy = chunked_logprobs(hidden, weight, None, TARGET_N[:0], TEMPERATURE_N[:0], 4)
    (logp.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and not weight.grad.any()


def test_a_chunk_holds_as_many_tokens_as_fit_and_one_at_least() -> None:
    assert tokens_within(128 * 1024, 64) == chunk_tokens(128 * 1024, 64, "cuda") == 128
    assert tokens_within(10**9, 1) == chunk_tokens(10**9, 1, "cpu") == 1


@pytest.mark.parametrize(("vocabulary", "tokens"), [(1024, 4096), (32 * 1024, 128), (151_936, 128), (2**20, 64)])
def test_a_chunk_on_a_cpu_is_small_but_makes_up_for_reading_the_output_layer(vocabulary: int, tokens: int) -> None:
    assert chunk_tokens(vocabulary, 256, "cpu") == tokens
