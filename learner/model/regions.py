"""Short stretches of a row of attention blocks, computed together pair by pair: calls for their blocks would cost more than the
pairs that these spare.

Axes: T positions of the row, H heads, d width of a head, B stretches, W columns of them, Q of the last columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import Reach
from async_rlhf.learner.batch.micro_batch import attention_bias

# Columns that a stretch may be filled up by, to be computed with others.
_FILLED = 16


Span = tuple[int, int, int, int]
"""A line of `PolicyInputs.blocks_B4`."""


class Stretch(NamedTuple):
    """Positions [begin, end) of the row."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def alike(stretches: Iterable[Stretch]) -> list[list[Stretch]]:
    """Longest first, of lengths that differ little."""
    found = list[list[Stretch]]()
    for each in sorted(stretches, key=lambda each: -each.length):
        if not found or each.length + _FILLED < found[-1][0].length:
            found.append([])
        found[-1].append(each)
    return found


def regions(spans: Iterable[Span]) -> list[tuple[Stretch, list[Span]]]:
    """Stretches that attend to nothing outside, and their blocks."""
    found: list[tuple[Stretch, list[Span]]] = []
    for span in sorted(spans, key=lambda span: (span[2], span[0])):
        if not found or span[2] >= found[-1][0].end:
            found.append((Stretch(span[2], span[1]), []))
        stretch, own = found[-1]
        own.append(span)
        found[-1] = Stretch(stretch.begin, max(stretch.end, span[1])), own
    return found


@dataclass(frozen=True)
class SeenRow:
    """own_T: int64, the number of the block of a position that attends to itself; shared_T: bool, whether it is of a prompt
    that several completions attend to. reach: of a layer."""

    own_T: Tensor
    shared_T: Tensor
    positions_T: Tensor
    reach: Reach

    @classmethod
    def of(cls, spans: Sequence[Span], positions_1T: Tensor, reach: Reach) -> SeenRow:
        begins_T, shared_T = np.zeros(positions_1T.shape[1], np.int64), np.zeros(positions_1T.shape[1], np.bool_)
        for query, _, key, stop in spans:
            if query == key:
                begins_T[query] = 1
            else:
                shared_T[key:stop] = True
        return cls(torch.from_numpy(begins_T.cumsum()), torch.from_numpy(shared_T), positions_1T[0], reach)

    def seen(self, place_BW: Tensor) -> Tensor:
        """bool [B, W, W], of positions of one region each: what queries (second axis) attend to."""
        own_BW, at_BW = self.own_T[place_BW], self.positions_T[place_BW]
        seen_BWW = (own_BW[:, :, None] == own_BW[:, None]) | self.shared_T[place_BW][:, None]
        seen_BWW &= self.reach.covers(at_BW[:, :, None], at_BW[:, None])
        return seen_BWW.tril()


@dataclass(frozen=True)
class Places:
    """Of stretches that are computed together. place_BW: int64, positions in the row, the last of a stretch again where it is
    shorter than others; is_own_BW: False there, None where all are as long."""

    place_BW: Tensor
    is_own_BW: Tensor | None

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> Places:
        begin_B1, length_B1 = torch.tensor([(each.begin, each.length) for each in stretches]).T[..., None]
        column_W = torch.arange(int(length_B1.max()))
        is_own_BW = column_W < length_B1
        place_BW = begin_B1 + torch.minimum(column_W, length_B1 - 1)
        return cls(place_BW, None if bool(is_own_BW.all()) else is_own_BW)

    def behind(self, first: int) -> Places:
        return Places(self.place_BW[:, first:], None if self.is_own_BW is None else self.is_own_BW[:, first:])

    def taken(self, whole: Tensor) -> Tensor:
        """[1, H, T, d] to [B, H, W, d], in 32 bits at least."""
        rows_BHW = self._rows(whole)
        rows = whole.transpose(1, 2).reshape(-1, whole.shape[-1]).index_select(0, rows_BHW.flatten())
        return rows.view(*rows_BHW.shape, whole.shape[-1]).to(torch.promote_types(whole.dtype, torch.float32))

    def put(self, whole: Tensor, part: Tensor) -> None:
        """The reverse: the other positions of `whole` stay as they are."""
        rows, part = self._rows(whole), part.reshape(-1, whole.shape[-1]).to(whole.dtype)
        if self.is_own_BW is not None:
            own_S = self.is_own_BW[:, None].expand_as(rows).flatten().nonzero()[:, 0]
            rows, part = rows.flatten()[own_S], part.index_select(0, own_S)
        whole.transpose(1, 2).view(-1, whole.shape[-1]).index_copy_(0, rows.flatten(), part)

    def cleared_(self, part: Tensor) -> Tensor:
        """[B, H, W, d], zeros where stretches are filled up."""
        return part if self.is_own_BW is None else part.masked_fill_(~self.is_own_BW[:, None, :, None], 0)

    def _rows(self, whole: Tensor) -> Tensor:
        """int64 [B, H, W]: of `whole` as [T H, d]."""
        heads = whole.shape[1]
        return self.place_BW[:, None] * heads + torch.arange(heads)[:, None]


@dataclass(frozen=True)
class ShortRegions:
    """Stretches that attend to nothing outside. bias_B1QW: float32."""

    queries: Places
    keys: Places
    bias_B1QW: Tensor

    @classmethod
    def of(cls, stretches: Sequence[Stretch], row: SeenRow) -> ShortRegions:
        places = Places.of(stretches)
        return cls(places, places, attention_bias(row.seen(places.place_BW), torch.float32))

    def behind(self, asked_T: Tensor) -> ShortRegions:
        """Without the queries before the first that one of them is asked for."""
        first = int(asked_T[self.queries.place_BW].int().argmax(1).min())
        return replace(self, queries=self.queries.behind(first), bias_B1QW=self.bias_B1QW[:, :, first:])

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """What queries read, [B, H, Q, d], and the weights, [B, H, Q, W]."""
        q, k, v = self.queries.taken(query).mul_(scale), self.keys.taken(key), self.keys.taken(value)
        weights = torch.matmul(q, k.mT).add_(self.bias_B1QW).softmax(-1)
        return torch.matmul(weights, v), weights

    def gradients(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float
    ) -> Iterator[tuple[Places, Tensor]]:
        """Of queries, keys and values."""
        q, k, v = self.queries.taken(query).mul_(scale), self.keys.taken(key), self.keys.taken(value)
        g = self.queries.cleared_(self.queries.taken(grad))
        of_scores = torch._softmax_backward_data(torch.matmul(g, v.mT), weights, -1, weights.dtype)
        yield self.queries, torch.matmul(of_scores, k).mul_(scale)
        yield self.keys, torch.matmul(of_scores.mT, q)
        yield self.keys, torch.matmul(weights.mT, g)
