"""Log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical

from async_rlhf.learner.batch.sampling_mask import SamplingMasks
from async_rlhf.learner.model.chunks import chunk_tokens, tokens_within
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_entropy, token_logprobs


@pytest.fixture
def logits_NV() -> torch.Tensor:
    return 5 * torch.randn(7, 11, generator=torch.Generator().manual_seed(0))


TARGET_N = torch.tensor([0, 10, 3, 3, 7, 1, 5])
TEMPERATURE_N = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7, 10.0, 1.5])


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    remembered=st.sampled_from([0, 3, 7]),
    biased=st.booleans(),
    restricted=st.booleans(),
)
def test_whole_and_in_chunks_they_and_their_gradients_are_those_of_the_tempered_distribution_of_each_token(
    seed: int, rows: int, remembered: int, biased: bool, restricted: bool
) -> None:
    """Also of one that is renormalised over part of the vocabulary."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((7, 5), (11, 5), (11,))[: 2 + biased]
    exact = [(2 * torch.randn(*shape, generator=random, dtype=torch.float64)).requires_grad_() for shape in shapes]
    given_ = [each.detach().float().requires_grad_() for each in exact]
    kept = torch.rand(7, 11, generator=random) < 0.4
    kept[torch.arange(7), TARGET_N] = True
    cut_off = torch.rand(7, generator=random) < 0.7  # the others come from the whole vocabulary
    sizes = kept.sum(-1) * cut_off
    masks = SamplingMasks(sizes, kept[cut_off].nonzero()[:, 1]) if restricted else None
    logits = exact[0] @ exact[1].T + (exact[2] if biased else 0)
    if restricted:
        logits = logits.masked_fill(~kept & cut_off[:, None], -1e30)
    distribution = Categorical(logits=logits / TEMPERATURE_N[:, None])
    wanted = [distribution.log_prob(TARGET_N), distribution.entropy()]  # type: ignore[no-untyped-call]
    hidden, weight, bias = [*given_, None][:3]
    assert hidden is not None and weight is not None
    whole_NV = hidden @ weight.T + (0 if bias is None else bias)
    whole = [token_logprobs(whole_NV, TARGET_N, TEMPERATURE_N, masks), token_entropy(whole_NV, TEMPERATURE_N, masks)]
    chunked = chunked_logprobs(hidden, weight, bias, TARGET_N, TEMPERATURE_N, rows, masks, remembered=remembered)
    factors = torch.randn(2, 7, generator=random)

    def with_gradients(pair: Sequence[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients = torch.autograd.grad((torch.stack(list(pair)) * factors).sum(), leaves, retain_graph=True)
        return [each.detach().float() for each in (*pair, *gradients)]

    for found in (whole, chunked):
        for mine, theirs in zip(with_gradients(found, given_), with_gradients(wanted, exact), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


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
