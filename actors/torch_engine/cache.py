"""Keys and values of all running rows in preallocated buffers, each row at its own position.

A transformers `Cache` that any model's attention layers call through `update`. Before a pass the forward declares what the
pass brings: *chunks* of prefixes (each written to one or more rows, attention over what those rows hold before it and
over itself) or *tokens* (one per row, written at that row's own position, attention over the prefix that holds the
longest running row). The columns of a row beyond its position hold leftovers of earlier occupants; the mask hides them
and later tokens overwrite them. The buffers grow by need, so memory follows the longest sequence, not the model's
limit; with a limit in places, they have as many rows as fit at that length. On a CPU see `reserved`.

Axes: `R` rows, `N` running rows, `K` chunks, `P` chunk columns, `H` key heads, `T` columns, `D` head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from async_rlhf.actors.torch_engine.chunks import PaddedChunks
from async_rlhf.actors.torch_engine.scheduler import Size
from async_rlhf.buffers.routing import RoutingArray, routers

# Columns are added in multiples of this by default, and at least half of what is there, so that copying
# stays a small share; small, because columns that are never used stand between those that are and cost bandwidth.
COLUMNS_STEP = 16


class RowCache(Cache):  # type: ignore[misc]  # transformers ships without types
    """Owns `keys[layer]` and `values[layer]`, both [R, H, T, D], made when a layer is first seen; and where they are recorded
    the experts that computed each position, `routing[0]` [R, 1, T, layers x choices], which go where keys and values go.

    max_length: tokens of the longest row. max_places: most R x T, or None for `slots` rows at any length. step: columns
    are a multiple of it, a power of two. While a buffer is replaced by a larger one, both exist: one layer's keys, or
    values, at a time.
    """

    def __init__(
        self, slots: int, max_length: int | None = None, max_places: int | None = None, step: int = COLUMNS_STEP
    ) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.routing: list[torch.Tensor] = []
        self._choices = 0
        self.is_in_pass = False  # that was begun; others, of a probe, leave nothing
        self._slots = slots
        self._max_length, self._max_places, self._step = max_length, max_places, step
        self._num_columns = 0
        self._num_rows = slots
        self._chunks: PaddedChunks | None = None
        self._length = 0
        self._positions = torch.empty(0, dtype=torch.int64)
        # Rows of the tokens of this pass, and where these go in a flattened buffer, by number of heads.
        self._of_rows = torch.empty(0, dtype=torch.int64)
        self._places: dict[int, torch.Tensor] = {}

    def expect(self, length: int) -> None:
        """A row may come to have so many tokens."""

    def fits(self, size: Size) -> bool:
        """Whether rows of this size stay within `max_places`."""
        return self._max_places is None or size.num_rows * self._columns_for(size.longest) <= self._max_places

    @property
    def num_places(self) -> int:
        """Tokens there is room for, or may be."""
        return self._num_rows * self._num_columns if self._max_places is None else self._max_places

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.buffers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values, *self.routing]

    def columns_within(self, length: int) -> int:
        """`length`, or the most there may be."""
        return min(length, self._max_length) if self._max_length else length

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are; others when they were replaced."""
        return tuple(buffer.data_ptr() for buffer in self.buffers)

    def begin_chunks(self, chunks: PaddedChunks) -> None:
        """The next pass computes these chunks."""
        self.reserve(chunks.length)
        self._chunks, self._length = chunks, chunks.length

    def begin_tokens(self, positions: torch.Tensor, length: int, rows: torch.Tensor | None = None) -> None:
        """The next pass brings tokens at int64 [N] positions below `length`: one in each of rows 0 .. N - 1, or in `rows`,
        int64 [N], any number in each."""
        self.reserve(length, len(positions) if rows is None else int(rows.max()) + 1)
        self._chunks, self._length = None, length
        self._positions = positions
        self._of_rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        self._places.clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values [K or N, H, P or 1, D]; returns those that attention shall see."""
        if self._chunks is not None:
            return self.write_chunks(layer_idx, key_states, value_states, self._chunks)
        return self.write_tokens(layer_idx, key_states[:, :, 0], value_states[:, :, 0])

    def write_chunks(
        self, layer: int, new_keys: torch.Tensor, new_values: torch.Tensor, chunks: PaddedChunks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [K, H, P, D] in the rows that get each chunk; returns [K, H, P or length, D] of keys and values to see."""
        seen = []
        for buffers, new in ((self.keys, new_keys), (self.values, new_values)):
            buffer = self._buffer(buffers, layer, new)
            self._store(buffer, new, chunks)
            seen.append(new if chunks.sources is None else buffer[chunks.sources, :, : chunks.length])
        return seen[0], seen[1]

    def _store(self, buffer: torch.Tensor, new: torch.Tensor, chunks: PaddedChunks) -> None:
        """[K, H, P, D] into the rows that get each chunk."""
        buffer[chunks.place[0], :, chunks.place[1]] = new[chunks.origin[0], :, chunks.origin[1]]

    def write_tokens(self, layer: int, new_keys: torch.Tensor, new_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [N, H, D] at the places of `begin_tokens`; returns keys and values of the first N rows at most, views of
        [N, H, length, D]."""
        num_rows, num_heads, _ = new_keys.shape
        keys = self._buffer(self.keys, layer, new_keys)
        values = self._buffer(self.values, layer, new_values)
        place = self._place(num_heads)
        for buffer, new in ((keys, new_keys), (values, new_values)):
            # One flat index over [R H T] is half the price of a joint index over rows and columns.
            width = new.shape[-1]
            buffer.view(-1, width).index_copy_(0, place, new.reshape(-1, width))
        return keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]

    def record_routing(self, model: Any) -> None:
        """From now on. Raises ConfigError for a model whose experts cannot be recorded."""
        found = routers(model)
        dtype = torch.uint8 if found[0].num_experts <= 256 else torch.int16
        for layer, router in enumerate(found):
            part = slice(layer * router.top_k, (layer + 1) * router.top_k)
            router.register_forward_hook(partial(self._routed, part, torch.empty(0, 1, len(found) * router.top_k, dtype=dtype)))
        self._choices = found[0].top_k

    def _routed(self, part: slice, like: torch.Tensor, router: Any, inputs: Any, outputs: Any) -> None:
        """Store what a router chose, int64 [K P or N, k], in its part of each position's numbers."""
        if not self.is_in_pass:
            return
        chosen: torch.Tensor = outputs[2]
        buffer = self._buffer(self.routing, 0, like.to(chosen.device))
        if self._chunks is None:
            buffer.view(-1, like.shape[-1])[self._place(1), part] = chosen.to(like.dtype)
        else:
            place, origin = self._chunks.place, self._chunks.origin
            chosen = chosen.view(*self._chunks.ids.shape, -1)[origin[0], origin[1]]
            buffer[place[0], 0, place[1], part] = chosen.to(like.dtype)

    def routing_of(self, row: int, length: int) -> RoutingArray | None:
        """[length, layers, choices]: of its first positions; None where nothing is recorded."""
        if not self.routing:
            return None
        found = self.routing[0][row, 0, :length].cpu().clone().numpy().reshape(length, -1, self._choices)
        return found if found.dtype == np.uint8 else found.astype(np.uint16)

    def _place(self, num_heads: int) -> torch.Tensor:
        """int64 [N H]: index of (row, head, position) in a buffer of [R, H, T] places."""
        if num_heads not in self._places:
            lines = self._of_rows[:, None] * num_heads + torch.arange(num_heads, device=self._of_rows.device)
            self._places[num_heads] = (lines * self._num_columns + self._positions[:, None]).flatten()
        return self._places[num_heads]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Other requests begin in these rows. What they held is hidden by their positions."""

    def release(self, num_rows: int) -> None:
        """From this row on all are free."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Rows `targets` get the first `length` columns of rows `sources`; no row may be both."""
        if length == 0 or not self.keys:
            return
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def keep_row(self, row: int, length: int) -> tuple[torch.Tensor, ...]:
        """Its first `length` columns, copied out: keys of all layers, then values, [H, length, D] each, then experts."""
        return tuple(buffer[row, :, :length].clone() for buffer in self.buffers)

    def put_row(self, row: int, kept: tuple[torch.Tensor, ...]) -> None:
        """`row` begins with what `keep_row` copied out of another."""
        for buffer, part in zip(self.buffers, kept, strict=True):
            buffer[row, :, : part.shape[1]] = part

    def reserve(self, length: int, num_rows: int = 0) -> None:
        """Make sure every buffer has at least `length` columns and `num_rows` rows, keeping what they hold."""
        if length <= self._num_columns and num_rows <= self._num_rows:
            return
        if self._max_places is None:
            columns = self._columns_for(max(length, self._num_columns * 3 // 2))
        else:
            columns = self._columns_for(length)
            self._num_rows = min(self._slots, self._max_places // columns)
        self._num_columns = columns
        for buffers in (self.keys, self.values, self.routing):
            for index, old in enumerate(buffers):
                buffers[index] = new = self._new_buffer(old.shape[1], old)
                kept = (slice(min(len(old), len(new))), slice(None), slice(min(old.shape[2], columns)))
                new[kept] = old[kept]

    def _columns_for(self, length: int) -> int:
        """`length` rounded up; the coarser the longer where places are counted, so that long rows do not move often."""
        step = self._step if self._max_places is None else max(self._step, 1 << max(0, length.bit_length() - 4))
        columns = -(-length // step) * step
        return min(columns, -(-self._max_length // self._step) * self._step) if self._max_length else columns

    def _buffer(self, buffers: list[torch.Tensor], layer: int, new: torch.Tensor) -> torch.Tensor:
        """The buffer of a layer, made when the layer is first seen; layers come in order."""
        if layer == len(buffers):
            buffers.append(self._new_buffer(new.shape[1], new))
        return buffers[layer]

    def _new_buffer(self, num_heads: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros, because a hidden column takes part in attention with weight 0 and must be finite."""
        return like.new_zeros((self._num_rows, num_heads, self._num_columns, like.shape[-1]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._max_length or -1
