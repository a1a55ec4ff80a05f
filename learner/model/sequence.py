"""Ranks that share the positions of a row, for rows too long for one: Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

Every rank computes its L/n positions of everything but attention. Around attention an exchange of all with all trades positions
for heads, so that each rank attends over whole rows with 1/n of the heads, under any mask. The log-probabilities of all tokens
are then joined on every rank, which computes the whole loss; only its own tokens carry its gradient, so gradients add up over
the ranks to the whole one. Waits for the other ranks, in `predict` and in the backward pass, as long as the process group does.

Axes: R rows, L positions, l = L/n of this rank, H heads, d width of a head, N tokens, M of them this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rlhf.buffers.attention import attend_by
from async_rlhf.learner.batch.micro_batch import MicroBatch, PolicyInputs

_NAME = "ulysses"


@dataclass(frozen=True)
class Share:
    """One rank's share of a micro-batch."""

    own: PolicyInputs
    """Its positions and the M tokens they predict."""
    blocks_B4: Tensor
    """Blocks of whole rows, which are padded to a multiple of n, as are `positions_RL`."""
    positions_RL: Tensor
    index_M: Tensor
    """The M tokens' indices in the micro-batch."""
    num_tokens: int
    """N."""

    @classmethod
    def of(cls, batch: MicroBatch, rank: int, size: int) -> Share:
        length = batch.ids_RL.shape[1]
        whole = -(-length // size) * size
        width = whole // size
        blocks = batch.blocks_B4 + batch.blocks_B4[:, :1] // length * (whole - length)
        positions = pad(batch.positions_RL, (0, whole - length))
        mine = slice(rank * width, (rank + 1) * width)
        row_N, position_N = batch.source_N // length, batch.source_N % length
        index = (position_N // width == rank).nonzero()[:, 0]
        part = PolicyInputs(
            ids_RL=pad(batch.ids_RL, (0, whole - length))[:, mine],
            positions_RL=positions[:, mine],
            blocks_B4=blocks,
            source_N=row_N[index] * width + position_N[index] - rank * width,
            target_N=batch.target_N[index],
            temperature_N=batch.temperature_N[index],
            **({} if batch.sampling_masks is None else batch.sampling_masks.of(index)._asdict()),
        )
        return cls(part, blocks, positions, index, batch.num_tokens)

    def joined(self, value_M: Tensor) -> Tensor:
        """[N] or [N, K]: every token's, from the rank that has it; the gradient goes to the own ones."""
        value_N = torch.zeros(self.num_tokens, *value_M.shape[1:], dtype=value_M.dtype, device=value_M.device)
        return _Joined.apply(value_N.index_put((self.index_M,), value_M))  # type: ignore[no-untyped-call, no-any-return]


def share_attention(model: nn.Module) -> None:
    """Let the model's attention exchange positions for heads, in place."""
    attend_by(model, _NAME, _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> Any:
    """query, key, value: [R, H, l, d], the mask [R, 1, L, L]. Where the mask is no longer than the query nothing is shared."""
    if attention_mask is None or attention_mask.shape[-1] == query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    whole = [_exchanged(each, to_heads=True) for each in (query, key, value)]
    out, weights = sdpa_attention_forward(module, *whole, attention_mask, **named)  # [R, L, H/n, d]
    return _exchanged(out.transpose(1, 2), to_heads=False).transpose(1, 2).contiguous(), weights


def _exchanged(x: Tensor, to_heads: bool) -> Tensor:
    """[R, H, l, d] <-> [R, H/n, L, d], with gradient; each is the other's."""
    split, joined = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(dist.get_world_size(), dim=split)).contiguous()
    received = all_to_all_single(torch.empty_like(sent), sent)  # type: ignore[no-untyped-call]
    return torch.cat(list(received), dim=joined)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad
