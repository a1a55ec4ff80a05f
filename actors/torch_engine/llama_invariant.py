"""`LlamaForward` whose numbers for a token do not depend on what else is in the pass, nor on how its row came to be there.

A product's rounding depends on its shape, so here every product that a token takes part in has a shape that its request
alone decides, or one that gives the same bits (`shapes`). Prompts are cut into *pieces* at multiples of `PIECE` positions,
and the tokens of a piece attend in one product, in their places, whichever of them are there. Every token after a prompt
attends in a product of its own, as it did when it was sampled, also where a row that was sent back is computed again.
Columns that a token must not see get the weight 0. What a layer does beside attention is computed in blocks of tokens.

`tests/actors/test_torch_engine_invariance.py` holds it on the processor it runs on and on libraries that round by the whole
shape, for one thread.

Axes: as in `llama`; a group has `B` pieces of `L` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import additive, position_mask
from async_rlhf.actors.torch_engine.llama import Attend, LlamaForward, Product, can_serve
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.actors.torch_engine.segments import segments
from async_rlhf.actors.torch_engine.shapes import MOST_COLUMNS, SAFE, Columns, Sizes, choose_columns
from async_rlhf.buffers.attention import FULL
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace

# Tokens of a prompt that attend in one product.
PIECE = 16
# Pieces of chunks that attend together, where they are short: each of them gets a copy of its row's keys and values, at most so
# many numbers of each. Longer ones read them where they lie.
_TOGETHER, _COPIED = 64, 1 << 14
# The cache has columns in multiples of this: a row's last block may have so many more than it needs.
CACHE_STEP = 256


def can_be_invariant(model: PreTrainedModel) -> bool:
    """Whether a head is whole vectors of 16 bytes: products depend on where else in memory a head begins."""
    return can_serve(model) and model.get_decoder().layers[0].self_attn.head_dim % 4 == 0


@dataclass(frozen=True)
class _PieceGroup:
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
class _TokenPiece:
    """Tokens `first`, `first + 1`, ... of the pass at the places `offset`, `offset + 1`, ... of a piece of `row`."""

    base: int
    """Position of place 0."""
    row: int
    first: int
    offset: int
    count: int


class InvariantLlamaForward(LlamaForward):
    """As `LlamaForward`; the cache must have columns in multiples of `CACHE_STEP`."""

    _few = 0  # a product rounds alike however many rows there are

    def __init__(self, model: PreTrainedModel, cache: RowCache, tower: ImageTower | None = None) -> None:
        super().__init__(model, cache, tower)
        self._any_token = _random(0, 1, self._embedding.shape[1])
        self._layer_sizes, self._output_sizes = Sizes(self._try_layer), Sizes(self._try_output)
        longest = cache.columns_within(MOST_COLUMNS)
        keys, values = (_random(seed, self._num_key_heads, -(-longest // SAFE) * SAFE, self._width) for seed in range(2))
        # By tokens that a piece has places for.
        self._columns = {size: choose_columns(partial(self._try_columns, size, keys, values), longest) for size in (1, PIECE)}
        # By tokens of a piece and columns: how many pieces may attend together.
        self._group_sizes: dict[tuple[int, int], Sizes] = {}

    def __call__(
        self, chunks: Sequence[PrefillChunk], tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """As in `Forward`, in one pass."""
        num_rows = len(tokens)
        ids, at, prompts, first = [tokens], [positions], list[PromptPlace](), num_rows
        for chunk in chunks:
            if chunk.images:
                prompts.append(PromptPlace(0, first, chunk.ids, chunk.images))
            first += len(chunk.ids)
            ids.append(torch.tensor(chunk.ids))
            at.append(torch.arange(chunk.start, chunk.start + len(chunk.ids)))
        stored, rows = _written(chunks, num_rows)
        places = torch.cat(at)
        num_columns = max(columns.padded(length) for columns in self._columns.values())
        self._cache.begin_tokens(places[stored], num_columns, rows)
        groups = [*self._row_groups(positions.tolist()), *self._prefix_groups(chunks, num_rows)]

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (k[stored], v[stored]) if chunks else (k[:num_rows], v[:num_rows])
            keys, values = self._cache.write_tokens(index, k, v)
            attended = q.new_zeros(len(q), self._num_heads * self._width)
            for group in groups:
                self._attend_group(group, q, keys, values, attended)
            return attended

        self._extend_rotations(length)
        return self._compute(self._embedded(torch.cat(ids)[None], prompts), places, num_rows, attend)

    def _compute(self, x: torch.Tensor, positions: torch.Tensor, num_wanted: int, attend: Attend) -> torch.Tensor:
        """As in `LlamaForward`, in blocks of tokens."""
        sizes, wanted = self._layer_sizes.blocks(len(x)), self._output_sizes.blocks(num_wanted)
        x, positions = (_padded(part, sum(sizes)) for part in (x, positions))
        cos, sin = _split(self._cos[positions], sizes), _split(self._sin[positions], sizes)
        last = len(self._layers) - 1
        for index, layer in self._layers.items():
            parts = [self._before(layer, *part) for part in zip(_split(x, sizes), cos, sin, strict=True)]
            attended = attend(index, *map(_joined, zip(*parts, strict=True)))
            if index == last:
                # Of the others only the keys and values are wanted, and the last of them are stored.
                x, attended, sizes = _padded(x, sum(wanted)), _padded(attended, sum(wanted)), wanted
            for block, of_block in zip(_split(x, sizes), _split(attended, sizes), strict=True):
                self._after(layer, block, of_block if len(sizes) == 1 else of_block.clone())  # alignment matters too
        return _joined([self._head(self._normed(block, self._norm)) for block in _split(x, sizes)])[:num_wanted]

    def _row_groups(self, positions: Sequence[int]) -> Iterator[_PieceGroup]:
        """The newest token of each row, a piece of its own; neighbouring rows attend together, where their caches lie."""
        for start, stop, length in segments(positions):
            mask = self._piece_mask(torch.tensor(positions[start:stop]), 1, length)
            yield _PieceGroup(slice(start, stop), slice(start, stop), None, mask)

    def _prefix_groups(self, chunks: Sequence[PrefillChunk], num_rows: int) -> Iterator[_PieceGroup]:
        """The tokens of chunks: pieces of prompts, and pieces of one token after a prompt."""
        of_prompts, singles = _pieces(chunks, num_rows)
        for pieces, size in ((of_prompts, PIECE), (singles, 1)):
            pieces.sort(key=lambda piece: piece.base)
            for start, stop, length in segments([piece.base + size - 1 for piece in pieces]):
                count = _TOGETHER if length * self._num_key_heads * self._width <= _COPIED else 1
                for first in range(start, stop, count):
                    yield self._group(pieces[first : min(first + count, stop)], size, length)

    def _group(self, pieces: Sequence[_TokenPiece], size: int, length: int) -> _PieceGroup:
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
        row = pieces[0].row
        rows = slice(row, row + 1) if len(pieces) == 1 else torch.tensor([piece.row for piece in pieces])
        return _PieceGroup(rows, tokens.view(-1, size), answered, mask)

    def _piece_mask(self, bases: torch.Tensor, size: int, length: int) -> torch.Tensor:
        """[B J, L G, T]: 0 up to the position of each place, the lowest finite number beyond; bases: int64 [B], of place 0."""
        at = bases[:, None] + torch.arange(size)
        return self._of_heads(position_mask(at, self._columns[size].padded(length), torch.float32, FULL))

    def _attend_group(
        self, group: _PieceGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attended: torch.Tensor
    ) -> None:
        """Fill in of [S, H D] what the group's tokens attended to; keys, values: [R, J, columns, D]."""
        queries, columns = q[group.tokens], group.mask.shape[-1]
        row_keys, row_values = (part[group.rows][:, :, :columns].flatten(0, 1) for part in (keys, values))
        if group.answered is None:
            queries = queries.clone(memory_format=torch.contiguous_format)  # of one row it would lie where the row does
            answer = self._together(1, queries.view(len(row_keys), -1, self._width), row_keys, row_values, group.mask)
            attended[group.tokens] = answer.view(len(queries), -1)
            return
        # [B, J, L, G, D]: of a head the tokens of a piece together.
        size = queries.shape[1]
        by_head = queries.view(*queries.shape[:2], self._num_key_heads, -1, self._width).transpose(1, 2)
        answer = self._together(size, by_head.reshape(len(row_keys), -1, self._width), row_keys, row_values, group.mask)
        by_token = answer.view(by_head.shape).transpose(1, 2).reshape(queries.shape[0] * size, -1)
        attended[group.answered[0]] = by_token[group.answered[1]]

    def _together(
        self, size: int, queries: torch.Tensor, row_keys: torch.Tensor, row_values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """queries [B J, L G, D] of pieces of L = size places over keys and values [B J, T, D] -> [B J, L G, D]."""
        num_heads, num_columns = self._num_key_heads, mask.shape[-1]
        sizes = self._group_sizes.get((size, num_columns))
        if sizes is None:
            sizes = self._group_sizes[size, num_columns] = Sizes(partial(self._try_group, size, num_columns), (1,))
        if sizes.holds(len(queries) // num_heads):
            return self._over(self._columns[size], queries, row_keys, row_values, mask)
        parts = (torch.split(part, num_heads) for part in (queries, row_keys, row_values, mask))
        return torch.cat([self._over(self._columns[size], each[0].clone(), *each[1:]) for each in zip(*parts, strict=True)])

    def _over(
        self, columns: Columns, queries: torch.Tensor, row_keys: torch.Tensor, row_values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """queries [M, L G, D] over keys and values [M, T, D] -> [M, L G, D].

        Of several blocks of columns each is normalised by itself; their shares of the whole follow from the largest weight
        within each, exp(0) / sum, and its score. One that has no visible column has the share 0.
        """
        if mask.shape[-1] <= columns.block:
            return self._within(columns.values, queries, row_keys, row_values, mask)[0]
        answers, tops, largest = [], [], []
        for start in range(0, mask.shape[-1], columns.block):
            part = slice(start, start + columns.block)
            answer, scores, weights = self._within(
                columns.values, queries, row_keys[:, part], row_values[:, part], mask[:, :, part]
            )
            answers.append(answer)
            tops.append(scores.amax(-1))
            largest.append(weights.amax(-1))
        top = torch.stack(tops)
        shares = (top - top.amax(0)).exp_() / torch.stack(largest)
        # Of a single block that is seen exactly 1, so that unseen ones beside it change nothing.
        shares /= _sum(shares)
        return _sum(torch.stack(answers).mul_(shares[..., None]))

    def _within(
        self, num_values: int, queries: torch.Tensor, row_keys: torch.Tensor, row_values: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention in a block of T columns: the output [M, L G, D], the scores and the weights, [M, L G, T]."""
        scores = torch.baddbmm(mask, queries, self._widened(row_keys).transpose(1, 2), alpha=self._width**-0.5)
        weights = scores.softmax(dim=-1)
        row_values = self._widened(row_values)
        answer = torch.bmm(weights[:, :, :num_values], row_values[:, :num_values])
        for start in range(num_values, row_values.shape[1], num_values):
            answer.baddbmm_(weights[:, :, start : start + num_values], row_values[:, start : start + num_values])
        return answer, scores, weights

    # -- whether shapes may be used: equal items, by the weights that are there

    def _try_layer(self, size: int) -> tuple[torch.Tensor, ...]:
        x, layer = self._any_token.repeat(size, 1), self._layers[0]
        angles = (torch.full((size, 1, self._width), part) for part in (0.6, 0.8))
        q, k, v = self._before(layer, x, *angles)
        self._after(layer, x, q.flatten(1))
        return q, k, v, x, *_cancelling(size, layer.qkv, layer.out, layer.gate_up, layer.down)

    def _try_output(self, size: int) -> tuple[torch.Tensor, ...]:
        x, layer = self._any_token.repeat(size, 1), self._layers[len(self._layers) - 1]
        self._after(layer, x, x.repeat(1, self._num_heads)[:, : self._num_heads * self._width].contiguous())
        return x, self._head(self._normed(x, self._norm)), *_cancelling(size, layer.out, layer.gate_up, layer.down, self._head)

    def _try_columns(
        self, size: int, keys: torch.Tensor, values: torch.Tensor, columns: Columns, num_columns: int, num_visible: int
    ) -> torch.Tensor:
        """One piece of `size` places, which all see so many of the columns [J, T, D]."""
        queries = _random(2, self._num_key_heads, size * self._num_heads // self._num_key_heads, self._width)
        mask = additive(torch.arange(num_columns) < num_visible, torch.float32).expand(*queries.shape[:2], -1)
        return self._within(columns.values, queries, keys[:, :num_columns], values[:, :num_columns], mask)[0]

    def _try_group(self, size: int, num_columns: int, count: int) -> tuple[torch.Tensor, ...]:
        """So many pieces over the same keys and values."""
        num_matrices = count * self._num_key_heads
        keys, values = (_random(seed, 1, num_columns, self._width).expand(num_matrices, -1, -1) for seed in range(2))
        queries = _random(2, 1, size * self._num_heads // self._num_key_heads, self._width).repeat(num_matrices, 1, 1)
        mask = torch.zeros(num_matrices, queries.shape[1], num_columns)
        return (self._over(self._columns[size], queries, keys, values, mask),)


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _cancelling(size: int, *products: Product) -> Iterator[torch.Tensor]:
    """[size, out] of each: equal items through one of its shape and type whose exact answers are 0. What is left are the errors
    of its sums: beside an answer of 16 bits they are seldom seen, so that real weights would have to be tried for long."""
    for product in products:
        (rows, summed), dtype = product.shape, product.dtype
        if dtype == torch.float32:
            continue
        order = torch.randperm(summed, generator=torch.Generator().manual_seed(5))
        w, x = (_random(seed, count, summed // 2).to(dtype) for seed, count in ((3, min(rows, 64)), (4, 1)))
        rest = w.new_zeros(len(w), summed % 2)
        weights = torch.cat((w, -w, rest), 1)[:, order].repeat(-(-rows // len(w)), 1)[:rows]
        yield Product(weights, few=0)(torch.cat((x, x, rest[:1]), 1)[:, order].expand(size, -1))


def _split(part: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return (part,) if len(sizes) == 1 else torch.split(part, sizes)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _padded(part: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of [S, ...]; what is missing is as the first."""
    missing = count - len(part)
    return torch.cat((part, part[:1].expand(missing, *part.shape[1:]))) if missing > 0 else part[:count]


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """[K, ...] -> [...] in pairs of neighbours, so that zeros at the end change nothing, however many."""
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat((parts, torch.zeros_like(parts[:1])))
        parts = parts[::2] + parts[1::2]
    return parts[0]


def _written(chunks: Sequence[PrefillChunk], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [writes] each: tokens of the pass, and rows of the cache that get their keys and values."""
    tokens = rows = [torch.arange(num_rows)]
    first = num_rows
    for chunk in chunks:
        of_chunk = torch.arange(first, first + len(chunk.ids))
        tokens = [*tokens, of_chunk.repeat(len(chunk.rows))]
        rows = [*rows, torch.tensor(chunk.rows).repeat_interleave(len(chunk.ids))]
        first += len(chunk.ids)
    return torch.cat(tokens), torch.cat(rows)


def _pieces(chunks: Sequence[PrefillChunk], num_rows: int) -> tuple[list[_TokenPiece], list[_TokenPiece]]:
    """Those of prompts, and those after prompts, which have one token each."""
    of_prompts: list[_TokenPiece] = []
    singles: list[_TokenPiece] = []
    first = num_rows
    for chunk in chunks:
        done = 0
        while done < len(chunk.ids):
            position = chunk.start + done
            offset = 0 if chunk.sampled else position % PIECE
            count = 1 if chunk.sampled else min(PIECE - offset, len(chunk.ids) - done)
            piece = _TokenPiece(position - offset, chunk.rows[0], first + done, offset, count)
            (singles if chunk.sampled else of_prompts).append(piece)
            done += count
        first += len(chunk.ids)
    return of_prompts, singles
