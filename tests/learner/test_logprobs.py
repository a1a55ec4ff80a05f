"""Log-probabilities and entropies are those of torch.distributions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical

from async_rlhf.learner.batch.micro_batch import SamplingMasks
from async_rlhf.learner.config import chunk_tokens
from async_rlhf.learner.model.logprobs import chunked_logprobs, token_entropy, token_logprobs

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


def test_logits_of_any_size_give_finite_numbers_and_gradients() -> None:
    """Of a token of the vocabulary that is masked, too, and of no tokens."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 1e30, 0.0], [float("-inf"), 0.0, 0.0]])
    for row, logp, entropy in zip(logits, [-2e4, 0.0, -0.6931472], [0.0, 0.0, 0.6931472], strict=True):
        hidden = torch.zeros(1, 2, requires_grad=True)
        tokens = torch.tensor([1]), torch.ones(1)
        found = chunked_logprobs(hidden, torch.ones(3, 2), row, *tokens, 1)
        (found[0] + found[1]).sum().backward()  # type: ignore[no-untyped-call]
        whole = token_logprobs(row[None], *tokens), token_entropy(row[None], tokens[1])
        assert torch.cat(found).tolist() == torch.cat(whole).tolist() == pytest.approx([logp, entropy])
        assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())
        nothing = chunked_logprobs(hidden[:0], torch.ones(3, 2), row, tokens[0][:0], tokens[1][:0], 1)
        assert [len(each) for each in nothing] == [0, 0]


def test_from_half_precision_they_are_float32_and_so_is_the_gradient_of_the_layer() -> None:
    random = torch.Generator().manual_seed(1)
    hidden, weight = (2 * torch.randn(*shape, generator=random) for shape in ((7, 5), (11, 5)))
    layer = weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = chunked_logprobs(hidden, layer, None, TARGET_N, TEMPERATURE_N, 2)
    logp.sum().backward()  # type: ignore[no-untyped-call]
    whole = hidden @ weight.T
    assert logp.dtype == token_logprobs(whole.bfloat16(), TARGET_N, TEMPERATURE_N).dtype == torch.float32
    assert layer.grad is not None and layer.grad.dtype == torch.float32
    torch.testing.assert_close(logp, token_logprobs(whole, TARGET_N, TEMPERATURE_N), rtol=0.02, atol=0.2)


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "device"),
    [(1024, 4096, "cpu"), (151_936, 128, "cpu"), (2**20, 64, "cpu"), (10**9, 1, "cpu"), (128 * 1024, 512, "cuda")],
)
def test_a_chunk_is_small_on_a_cpu_but_makes_up_for_reading_the_output_layer(vocabulary: int, tokens: int, device: str) -> None:
    assert chunk_tokens(vocabulary, device) == tokens
