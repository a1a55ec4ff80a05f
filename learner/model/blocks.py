"""Attention block by block (`PolicyInputs.blocks_B4`), for models that call it through transformers' interface, on a CPU.

What a dense mask would compute and throw away is not computed: a prompt's keys are read by all its completions at once, and
completions of one row never meet. A query that looks into two blocks joins them by their weights, the sums of exponents that
torch's kernel returns (Dao et al. 2022, "FlashAttention", arXiv 2205.14135, section 3.1); its backward pass, given the joint
sums, finds each block's own part of the gradient. Short blocks that attend to themselves are computed together, each filled up
on its right, where none of its queries looks.

The last layer computes only positions that predict something: nothing reads what it makes of the others.

Axes: T positions of the only row, H heads, d width of a head, Q queries and K keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from async_rlhf.buffers.attention import FULL, Reach, attend_by, attends_by_name
from async_rlhf.learner.batch.micro_batch import PolicyInputs, attention_bias

_NAME = "blocks"
# Positions of a block that is computed with others: its call would cost more than its arithmetic. And of those that it may be
# filled up by beyond its own length.
_SHORT, _FILLED = 32, 8
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Span = tuple[int, int, int, int]
"""A line of `blocks_B4`."""


@dataclass(frozen=True)
class AttentionBlock:
    """[query, end) attend to [key, stop)."""

    query: int
    end: int
    key: int
    stop: int
    bias: Tensor | None
    """[1, 1, Q, K] as `attention_bias`; None where all keys are seen, or all before where these are the queries."""

    @property
    def is_own(self) -> bool:
        return self.key == self.query

    @property
    def is_causal(self) -> bool:
        return self.is_own and self.bias is None


@dataclass(frozen=True)
class _ShortBlocks:
    """Blocks that attend to themselves, the longest of `width` positions. place_S: int64, their positions in the row; filled_S:
    int64, the places of these in [block, width] flattened; None where all blocks are as long."""

    place_S: Tensor
    filled_S: Tensor | None
    width: int

    @classmethod
    def of(cls, blocks: Sequence[AttentionBlock]) -> _ShortBlocks:
        width = max(block.end - block.query for block in blocks)
        place_BQ = torch.tensor([block.query for block in blocks])[:, None] + torch.arange(width)
        is_own_BQ = place_BQ < torch.tensor([block.end for block in blocks])[:, None]
        filled_S = None if bool(is_own_BQ.all()) else is_own_BQ.flatten().nonzero().squeeze(1)
        return cls(place_BQ[is_own_BQ], filled_S, width)

    def taken(self, whole: Tensor) -> Tensor:
        """[1, H, T, d] to [B, H, width, d]; zeros where they are filled up."""
        rows_SHd = whole.transpose(1, 2)[0].index_select(0, self.place_S)
        if self.filled_S is not None:
            number = -(-(int(self.filled_S[-1]) + 1) // self.width) * self.width
            rows_SHd = rows_SHd.new_zeros(number, *rows_SHd.shape[1:]).index_copy_(0, self.filled_S, rows_SHd)
        return rows_SHd.view(-1, self.width, *rows_SHd.shape[1:]).transpose(1, 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """The reverse: the other positions of `whole` stay as they are."""
        rows_SHd = part.transpose(1, 2).flatten(0, 1)
        if self.filled_S is not None:
            rows_SHd = rows_SHd.index_select(0, self.filled_S)
        whole.transpose(1, 2)[0].index_copy_(0, self.place_S, rows_SHd)


@dataclass(frozen=True)
class _Blocks:
    """What a layer computes: short blocks together, then one after the other."""

    together: Sequence[_ShortBlocks]
    single: Sequence[AttentionBlock]

    @classmethod
    def of(cls, blocks: Iterable[AttentionBlock]) -> _Blocks:
        single, short = list[AttentionBlock](), list[AttentionBlock]()
        for block in blocks:
            (short if block.is_causal and block.end - block.query <= _SHORT else single).append(block)
        alike = list[list[AttentionBlock]]()
        for block in sorted(short, key=lambda block: block.query - block.end):
            longest = alike[-1][0] if alike else block
            if alike and block.end - block.query + _FILLED >= longest.end - longest.query:
                alike[-1].append(block)
            else:
                alike.append([block])
        return cls([_ShortBlocks.of(each) for each in alike], single)


@dataclass(frozen=True)
class _LayerPlan:
    """The attention blocks that a layer computes; the last layer computes fewer."""

    every: _Blocks
    last: _Blocks
    last_layer: int | None

    def of(self, module: nn.Module) -> _Blocks:
        return (
            self.last if self.last_layer is not None and getattr(module, "layer_idx", None) == self.last_layer else self.every
        )


def attend_in_blocks(model: nn.Module) -> bool:
    """Let the model's attention take the result of `planned` as its mask, in place; False where it does not use torch's."""
    if not attends_by_name(model):
        return False
    attend_by(model, _NAME, _attention)
    return True


def planned(batch: PolicyInputs, reach: Reach, dtype: torch.dtype, last_layer: int | None) -> Tensor:
    """The `attention_mask` argument for layers of this reach, for a batch of one row. last_layer: its number."""
    spans = [(query, end, key, stop) for query, end, key, stop in batch.blocks_B4.tolist()]
    asked = torch.zeros(batch.ids_RL.shape[1], dtype=torch.bool)
    asked[batch.source_N] = True
    every, last = (_Blocks.of(_blocks(each, batch.positions_RL, reach, dtype)) for each in (spans, _asked(spans, asked)))
    mask: Any = torch.empty(1, 1, 0, 0)  # models pass a mask of four dimensions on unchanged; an empty one has no other effect
    mask.plan = _LayerPlan(every, last, last_layer)
    return cast(Tensor, mask)


def _asked(spans: Sequence[Span], asked_T: Tensor) -> Iterator[Span]:
    """Blocks without the queries before the first requested one, where those are most of the block; their keys become a block
    of their own."""
    before: list[Span] = []
    for query, end, key, stop in spans:
        first = query + int(asked_T[query:end].int().argmax()) if query == key else query
        if first - query > end - first:
            before.append((first, end, query, first))
            yield first, end, first, end
        elif query == key:
            yield query, end, key, stop
        else:
            before.append((query, end, key, stop))
    yield from before


def _blocks(spans: Iterable[Span], positions_1T: Tensor, reach: Reach, dtype: torch.dtype) -> Iterator[AttentionBlock]:
    for query, end, key, stop in spans:
        queries, keys = positions_1T[:, query:end, None], positions_1T[:, None, key:stop]
        if reach == FULL or reach.covers(queries.amax(), keys[0, 0, 0]):
            yield AttentionBlock(query, end, key, stop, None)
            continue
        seen = reach.covers(queries, keys)
        seen = seen.tril() if key == query else seen
        if seen.any():
            yield AttentionBlock(query, end, key, stop, attention_bias(seen, dtype))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> Any:
    """query, key, value: [1, H, T, d]; keys and values may have fewer heads, values a smaller width. Without a plan torch's."""
    plan: _LayerPlan | None = getattr(attention_mask, "plan", None)
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
    width, scale = value.shape[-1], named.get("scaling") or query.shape[-1] ** -0.5
    narrow = width < query.shape[-1]  # the kernel takes one width
    value = pad(value, (0, query.shape[-1] - width)) if narrow else value
    out = _Blockwise.apply(query, key, value, plan.of(module), scale)  # type: ignore[no-untyped-call]
    return (out[..., :width] if narrow else out).transpose(1, 2).contiguous(), None


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: _Blocks, scale: float) -> Tensor:
        out = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums = torch.full(query.shape[:-1], -torch.inf, device=query.device)  # logarithms of sums of exponents
        for short in blocks.together:
            result, of_short = _flash(*map(short.taken, (query, key, value)), 0.0, True, attn_mask=None, scale=scale)
            short.put(out, result)
            short.put(sums[..., None], of_short[..., None])
        for block in blocks.single:
            at, seen = slice(block.query, block.end), slice(block.key, block.stop)
            q, k, v = query[:, :, at], key[:, :, seen], value[:, :, seen]
            result, of_block = _flash(q, k, v, 0.0, block.is_causal, attn_mask=block.bias, scale=scale)
            if block.is_own:
                out[:, :, at], sums[..., at] = result, of_block
            else:
                joint = torch.logaddexp(sums[..., at], of_block)
                out[:, :, at].mul_((sums[..., at] - joint).exp_()[..., None])
                out[:, :, at].addcmul_(result, (of_block - joint).exp_()[..., None])
                sums[..., at] = joint
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        grads = [torch.zeros_like(each) for each in (query, key, value)]
        for short in ctx.blocks.together:
            *taken, sums_BHQ1 = [short.taken(each) for each in (grad, query, key, value, out, sums[..., None])]
            parts = _flash_backward(*taken, sums_BHQ1[..., 0], 0.0, True, attn_mask=None, scale=ctx.scale)
            for whole, part in zip(grads, parts, strict=True):
                short.put(whole, part)
        for block in ctx.blocks.single:
            at, seen = slice(block.query, block.end), slice(block.key, block.stop)
            inputs = grad[:, :, at], query[:, :, at], key[:, :, seen], value[:, :, seen], out[:, :, at], sums[..., at]
            parts = _flash_backward(*inputs, 0.0, block.is_causal, attn_mask=block.bias, scale=ctx.scale)
            for whole, where, part in zip(grads, (at, seen, seen), parts, strict=True):
                whole[:, :, where].copy_(part) if block.is_own else whole[:, :, where].add_(part)
        return (*grads, None, None)
