"""Attention block by block (`PolicyInputs.blocks_B4`), for models that call it through transformers' interface, on a CPU.

What a dense mask would compute and throw away is not computed: a prompt's keys are read by all its completions at once, and
completions of one row never meet. A query that looks into two blocks joins them by their weights, the sums of exponents that
torch's kernel returns (Dao et al. 2022, "FlashAttention", arXiv 2205.14135, section 3.1); its backward pass, given the joint
sums, finds each block's own part of the gradient. Short blocks that attend to themselves are computed together, each filled up
on its right, where none of its queries looks; a short prompt with all its completions is computed pair by pair (`regions`).

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
from async_rlhf.learner.model.regions import Places, SeenRow, ShortRegions, Span, Stretch, alike, regions

_NAME = "blocks"
# Positions of a region that is computed pair by pair, and of a block in a longer one that is computed with others.
_SHORT_REGION, _SHORT_BLOCK = 128, 32
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
class _Blocks:
    """What a layer computes: short regions, short blocks that attend to themselves, then each other block."""

    regions: Sequence[ShortRegions]
    short: Sequence[Places]
    single: Sequence[AttentionBlock]

    @classmethod
    def of(cls, regions: Sequence[ShortRegions], blocks: Iterable[AttentionBlock]) -> _Blocks:
        single, short = list[AttentionBlock](), list[Stretch]()
        for block in blocks:
            if block.is_causal and block.end - block.query <= _SHORT_BLOCK:
                short.append(Stretch(block.query, block.end))
            else:
                single.append(block)
        return cls(regions, [Places.of(each) for each in alike(short)], single)


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
    asked_T = torch.zeros(batch.ids_RL.shape[1], dtype=torch.bool)
    asked_T[batch.source_N] = True
    row, split = SeenRow.of(spans, batch.positions_RL, reach), regions(spans)
    short = [ShortRegions.of(each, row) for each in alike(each for each, _ in split if each.length <= _SHORT_REGION)]
    long = [span for each, own in split if each.length > _SHORT_REGION for span in own]
    long.sort(key=lambda span: span[0] != span[2])
    every = _Blocks.of(short, _blocks(long, row, dtype))
    last = _Blocks.of([each.behind(asked_T) for each in short], _blocks(_asked(long, asked_T), row, dtype))
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


def _blocks(spans: Iterable[Span], row: SeenRow, dtype: torch.dtype) -> Iterator[AttentionBlock]:
    for query, end, key, stop in spans:
        queries, keys = row.positions_T[None, query:end, None], row.positions_T[None, None, key:stop]
        if row.reach == FULL or row.reach.covers(queries.amax(), keys[0, 0, 0]):
            yield AttentionBlock(query, end, key, stop, None)
            continue
        seen = row.reach.covers(queries, keys)
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
    with torch.autocast(query.device.type, enabled=False):  # pairs of short regions are computed in 32 bits
        out = _Blockwise.apply(query, key, value, plan.of(module), scale)  # type: ignore[no-untyped-call]
    return (out[..., :width] if narrow else out).transpose(1, 2).contiguous(), None


def _zeros_like(whole: Tensor) -> Tensor:
    """[1, H, T, d], in memory [T, H, d]."""
    return torch.zeros_like(whole.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: _Blocks, scale: float) -> Tensor:
        out = _zeros_like(query)
        sums = torch.full_like(out[..., 0], -torch.inf, dtype=torch.float32)  # logarithms of sums of exponents
        kept = []
        for region in blocks.regions:
            read, weights = region.attended(query, key, value, scale)
            region.queries.put(out, read)
            kept.append(weights)
        for places in blocks.short:
            result, of_short = _flash(*map(places.taken, (query, key, value)), 0.0, True, attn_mask=None, scale=scale)
            places.put(out, result)
            places.put(sums[..., None], of_short)
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
        ctx.save_for_backward(query, key, value, out, sums, *kept)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums, *kept = ctx.saved_tensors
        grads = [_zeros_like(each) for each in (query, key, value)]
        for region, weights in zip(ctx.blocks.regions, kept, strict=True):
            for whole, (columns, part) in zip(
                grads, region.gradients(grad, query, key, value, weights, ctx.scale), strict=True
            ):
                columns.put(whole, part)
        for places in ctx.blocks.short:
            g, *taken, sums_BHW1 = map(places.taken, (grad, query, key, value, out, sums[..., None]))
            of_short = _flash_backward(
                places.cleared_(g), *taken, sums_BHW1[..., 0], 0.0, True, attn_mask=None, scale=ctx.scale
            )
            for whole, part in zip(grads, of_short, strict=True):
                places.put(whole, part)
        for block in ctx.blocks.single:
            at, seen = slice(block.query, block.end), slice(block.key, block.stop)
            around = grad[:, :, at], query[:, :, at], key[:, :, seen], value[:, :, seen], out[:, :, at], sums[..., at]
            of_block = _flash_backward(*around, 0.0, block.is_causal, attn_mask=block.bias, scale=ctx.scale)
            for whole, where, part in zip(grads, (at, seen, seen), of_block, strict=True):
                whole[:, :, where].copy_(part) if block.is_own else whole[:, :, where].add_(part)
        return (*grads, None, None)
