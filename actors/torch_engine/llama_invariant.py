"""`LlamaForward` whose numbers for a token do not depend on what else is in the pass, nor on how its row came to be there.

A product's rounding depends on its shape, so here every product that a token takes part in has a shape that its request
alone decides. Prompts are cut into *pieces* at multiples of `PIECE` positions, and the tokens of a piece attend in one
product, in their places, whichever of them are there. Every token after a prompt attends in a product of its own, as it
did when it was sampled, also where a row that was sent back is computed again. Visible columns are rounded up, those a token
must not see get the weight 0, and values are added in blocks of so many columns that a product adds them one after the
other: then zeros at the end change nothing. Products with weights treat rows alike, if there are more than a few.

Nothing here is promised by the libraries that compute the products: `tests/actors/test_torch_engine_invariance.py` holds
it on the processor it runs on, for one thread.

Axes: as in `llama`; a group has `B` pieces of `L` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import position_mask
from async_rlhf.actors.torch_engine.llama import LlamaForward, can_pack, can_serve
from async_rlhf.actors.torch_engine.scheduler import Chunk
from async_rlhf.actors.torch_engine.segments import segments
from async_rlhf.buffers.attention import FULL

# Tokens of a prompt that attend in one product.
PIECE = 16
# Columns whose values are added in one product, and below how many rows a product adds any number one after the other.
BLOCK, FEW_ROWS = 128, 4
# Libraries have another way to multiply one row with weights, and where weights are not packed, a few.
MIN_ROWS, MIN_ROWS_NOT_PACKED = 2, 16
# torch has another way to multiply where rows x columns x width are fewer.
_SMALL_PRODUCT = 400
# Pieces after a prompt that attend together: each of them gets a copy of its row's keys and values.
_SINGLES = 64


def can_be_invariant(model: PreTrainedModel) -> bool:
    """Whether a head is whole vectors of 16 bytes: products depend on where else in memory a head begins."""
    return can_serve(model) and model.model.layers[0].self_attn.head_dim % 4 == 0


def columns_step(model: LlamaForCausalLM) -> int:
    """Visible columns are a multiple of this: 16, or more where that many columns of one head are a small product."""
    head_width, step = model.model.layers[0].self_attn.head_dim, 16
    while step * head_width < _SMALL_PRODUCT and step < BLOCK:
        step *= 2
    return step


@dataclass(frozen=True)
class _Group:
    """Pieces that attend together, each to the first T columns of its row.

    rows: of the cache, a slice or int64 [B]. tokens: tokens of the pass, a slice of B or int64 [B, L]; a place that no
    token of the pass takes holds any. answered: int64 [2, tokens]: tokens of the pass, and their places among B x L;
    None where all are. mask: [B J, L G, T].
    """

    rows: slice | torch.Tensor
    tokens: slice | torch.Tensor
    answered: torch.Tensor | None
    mask: torch.Tensor


@dataclass(frozen=True)
class _Piece:
    """Tokens `first`, `first + 1`, ... of the pass at the places `offset`, `offset + 1`, ... of a piece of `row`."""

    base: int
    """Position of place 0."""
    row: int
    first: int
    offset: int
    count: int


class InvariantLlamaForward(LlamaForward):
    """As `LlamaForward`; the cache must have columns in multiples of `columns_step`."""

    _few = 0  # a product rounds alike however many rows there are

    def __init__(self, model: LlamaForCausalLM, cache: RowCache) -> None:
        super().__init__(model, cache)
        self._step = columns_step(model)
        self._min_rows = MIN_ROWS if can_pack(model.dtype) else MIN_ROWS_NOT_PACKED

    def __call__(self, chunks: Sequence[Chunk], tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """As in `Forward`, in one pass."""
        num_rows = len(tokens)
        ids, at = [tokens], [positions]
        for chunk in chunks:
            ids.append(torch.tensor(chunk.ids))
            at.append(torch.arange(chunk.start, chunk.start + len(chunk.ids)))
        num_missing = self._min_rows - sum(map(len, ids))
        if num_missing > 0:
            ids.append(tokens[:1].expand(num_missing))
            at.append(positions[:1].expand(num_missing))
        stored, rows = _written(chunks, num_rows)
        places = torch.cat(at)
        self._cache.begin_tokens(places[stored], self._columns(length), rows)
        groups = [*self._row_groups(positions.tolist()), *self._prefix_groups(chunks, num_rows)]

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if chunks:
                k, v = k[stored], v[stored]
            keys, values = self._cache.write_tokens(index, k[: len(rows)], v[: len(rows)])
            attended = q.new_zeros(len(q), self._num_heads * self._width)
            for group in groups:
                self._attend_group(group, q, keys, values, attended)
            return attended

        self._extend_rotations(length)
        return self._compute(torch.cat(ids), places, max(num_rows, self._min_rows), attend)[:num_rows]

    def _row_groups(self, positions: Sequence[int]) -> Iterator[_Group]:
        """The newest token of each row, a piece of its own; neighbouring rows attend together, where their caches lie."""
        for start, stop, length in segments(positions):
            mask = self._piece_mask(torch.tensor(positions[start:stop]), 1, length)
            yield _Group(slice(start, stop), slice(start, stop), None, mask)

    def _prefix_groups(self, chunks: Sequence[Chunk], num_rows: int) -> Iterator[_Group]:
        """The tokens of chunks: pieces of prompts, and pieces of one token after a prompt."""
        of_prompts, singles = _pieces(chunks, num_rows)
        for pieces, size in ((of_prompts, PIECE), (singles, 1)):
            pieces.sort(key=lambda piece: piece.base)
            for start, stop, length in segments([piece.base + size - 1 for piece in pieces]):
                for first in range(start, stop, _SINGLES):
                    yield self._group(pieces[first : min(first + _SINGLES, stop)], size, length)

    def _group(self, pieces: Sequence[_Piece], size: int, length: int) -> _Group:
        """length: of the longest piece."""
        answered = torch.tensor(
            [
                (piece.first + each, index * size + piece.offset + each)
                for index, piece in enumerate(pieces)
                for each in range(piece.count)
            ]
        ).T
        tokens = answered.new_zeros(len(pieces) * size).index_copy_(0, answered[1], answered[0])
        mask = self._piece_mask(torch.tensor([piece.base for piece in pieces]), size, length)
        return _Group(torch.tensor([piece.row for piece in pieces]), tokens.view(-1, size), answered, mask)

    def _piece_mask(self, bases: torch.Tensor, size: int, length: int) -> torch.Tensor:
        """[B J, L G, T]: 0 up to the position of each place, the lowest finite number beyond; bases: int64 [B], of place 0."""
        at = bases[:, None] + torch.arange(size)
        return self._of_heads(position_mask(at, self._columns(length), torch.float32, FULL))

    def _attend_group(
        self, group: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attended: torch.Tensor
    ) -> None:
        """Fill in of [S, H D] what the group's tokens attended to; keys, values: [R, J, columns, D]."""
        queries, columns = q[group.tokens], group.mask.shape[-1]
        row_keys, row_values = (part[group.rows][:, :, :columns].flatten(0, 1) for part in (keys, values))
        if group.answered is None:
            answer = self._over(queries.reshape(len(row_keys), -1, self._width), row_keys, row_values, group.mask)
            attended[group.tokens] = answer.view(len(queries), -1)
            return
        # [B, J, L, G, D]: of a head the tokens of a piece together.
        by_head = queries.view(*queries.shape[:2], self._num_key_heads, -1, self._width).transpose(1, 2)
        answer = self._over(by_head.reshape(len(row_keys), -1, self._width), row_keys, row_values, group.mask)
        by_token = answer.view(by_head.shape).transpose(1, 2).reshape(queries.shape[0] * queries.shape[1], -1)
        attended[group.answered[0]] = by_token[group.answered[1]]

    def _over(
        self, queries: torch.Tensor, row_keys: torch.Tensor, row_values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """queries [B J, L G, D] over keys and values [B J, T, D] -> [B J, L G, D]."""
        weights = torch.baddbmm(mask, queries, self._widened(row_keys).transpose(1, 2), alpha=self._width**-0.5).softmax(dim=-1)
        row_values = self._widened(row_values)
        if row_values.shape[1] <= BLOCK or queries.shape[1] < FEW_ROWS:
            return torch.bmm(weights, row_values)
        answer = torch.bmm(weights[:, :, :BLOCK], row_values[:, :BLOCK])
        for start in range(BLOCK, row_values.shape[1], BLOCK):
            answer.baddbmm_(weights[:, :, start : start + BLOCK], row_values[:, start : start + BLOCK])
        return answer

    def _columns(self, length: int) -> int:
        return -(-length // self._step) * self._step


def _written(chunks: Sequence[Chunk], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [writes] each: tokens of the pass, and rows of the cache that get their keys and values."""
    tokens = rows = [torch.arange(num_rows)]
    first = num_rows
    for chunk in chunks:
        of_chunk = torch.arange(first, first + len(chunk.ids))
        tokens = [*tokens, of_chunk.repeat(len(chunk.rows))]
        rows = [*rows, torch.tensor(chunk.rows).repeat_interleave(len(chunk.ids))]
        first += len(chunk.ids)
    return torch.cat(tokens), torch.cat(rows)


def _pieces(chunks: Sequence[Chunk], num_rows: int) -> tuple[list[_Piece], list[_Piece]]:
    """Those of prompts, and those after prompts, which have one token each."""
    of_prompts: list[_Piece] = []
    singles: list[_Piece] = []
    first = num_rows
    for chunk in chunks:
        done = 0
        while done < len(chunk.ids):
            position = chunk.start + done
            offset = 0 if chunk.sampled else position % PIECE
            count = 1 if chunk.sampled else min(PIECE - offset, len(chunk.ids) - done)
            piece = _Piece(position - offset, chunk.rows[0], first + done, offset, count)
            (singles if chunk.sampled else of_prompts).append(piece)
            done += count
        first += len(chunk.ids)
    return of_prompts, singles
