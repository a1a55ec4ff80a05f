"""One token a row: the inverse of the cumulative distribution, searched by blocks where the vocabulary is large."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.torch_engine.sampling import sample

VOCABULARIES = [1, 2, 100, 256, 257, 511, 512, 3000]


def make_logits(vocabulary: int, seed: int, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def uniforms(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@given(st.sampled_from(VOCABULARIES), st.integers(0, 1000))
def test_the_token_is_the_first_at_which_the_sum_of_probabilities_exceeds_the_number(vocabulary: int, seed: int) -> None:
    logits, numbers = make_logits(vocabulary, seed), np.random.default_rng(seed).random(5)
    tokens, logprobs, _ = sample(logits, torch.from_numpy(numbers))
    probabilities = torch.softmax(logits.double(), -1)
    after = probabilities.cumsum(-1).gather(1, tokens[:, None])[:, 0].numpy()
    before = after - probabilities.gather(1, tokens[:, None])[:, 0].numpy()
    assert (before <= numbers + 1e-6).all() and (numbers - 1e-6 <= after).all()
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [100, 256, 3000])
def test_what_cannot_be_sampled_is_not_whatever_the_number(vocabulary: int) -> None:
    for only in (0, 1, vocabulary // 2, vocabulary - 1):
        logits = torch.full((3, vocabulary), -torch.inf)
        logits[:, only] = 2.0
        tokens, logprobs, _ = sample(logits, uniforms(0.0, 0.5, 1.0 - 2.0**-40))
        assert tokens.tolist() == [only] * 3 and logprobs.tolist() == [0.0] * 3


@pytest.mark.parametrize("vocabulary", [700, 3000])
def test_every_token_of_a_flat_distribution_has_its_share_of_the_numbers(vocabulary: int) -> None:
    numbers = (torch.arange(vocabulary, dtype=torch.float64) + 0.5) / vocabulary
    tokens, _, _ = sample(torch.zeros(vocabulary, vocabulary), numbers)
    assert tokens.tolist() == list(range(vocabulary))


@pytest.mark.parametrize("vocabulary", [100, 700])
def test_a_row_that_is_not_a_number_says_so_and_spoils_no_other(vocabulary: int) -> None:
    logits = make_logits(vocabulary, 0, 3)
    alone, _, _ = sample(logits, uniforms(0.1, 0.5, 0.9))
    logits[1] = torch.nan
    tokens, logprobs, _ = sample(logits, uniforms(0.1, 0.5, 0.9))
    assert 0 <= tokens[1] < vocabulary and logprobs.isnan().tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == alone[[0, 2]].tolist()
