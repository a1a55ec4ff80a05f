"""The share of each rank in a row; that two ranks make the step of one is in `test_ranks`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from making import make_group

from async_rlhf.learner.batch.micro_batch import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.batch.sampling_mask import SamplingMasks
from async_rlhf.learner.parallel.sequence import Share


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_token_is_of_one_rank_which_has_its_position_and_its_support(size: int) -> None:
    rows = make_rows([make_group(n, [3, 1, 6]) for n in range(2)], [[1.0, -1.0, 0.5]] * 2, 512)
    (plain,) = make_micro_batches(rows, Packing(512))
    sizes = torch.arange(plain.num_tokens) % 3
    batch = replace(plain, sampling_masks=SamplingMasks(sizes, torch.arange(int(sizes.sum()))))
    assert batch.sampling_masks is not None
    sampling_masks = batch.sampling_masks.chunks(1)
    shares = [Share.of(batch, rank, size) for rank in range(size)]
    assert torch.cat([share.index_M for share in shares]).sort().values.tolist() == list(range(batch.num_tokens))
    for share in shares:
        assert share.own.ids_RL.shape[1] * size == share.segments_RL.shape[1]
        assert share.own.target_N.equal(batch.target_N[share.index_M])
        read = share.own.ids_RL.flatten()[share.own.source_N]
        assert read.equal(batch.ids_RL.flatten()[batch.source_N[share.index_M]])
        assert share.own.sampling_masks is not None
        wanted = [sampling_masks[token].ids_K for token in share.index_M.tolist()]
        assert share.own.sampling_masks.ids_K.equal(torch.cat([*wanted, torch.empty(0, dtype=torch.int64)]))
