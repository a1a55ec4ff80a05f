"""A cache that keeps what a `KVPolicy` keeps, and the passes over it: memory does not grow with the length of a row.

A row has as many columns as the policy's budget, and a spare one, whatever its length. A token is written into any column
whose token is no longer seen: keys carry their rotation with them, so the order of columns means nothing. A chunk of a prefix
attends to the columns and to itself, each token to what the policy shows it, and what is still seen at its end is written.

Passes without the cache (`Forward.logits`: the canary's probe) attend to everything.

Axes: `N` running rows, `K` chunks, `P` longest chunk, `H` key heads, `C` columns with the spare one, `D` head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import PaddedChunks, additive
from async_rlhf.actors.torch_engine.forward import Forward
from async_rlhf.actors.torch_engine.kv_policy import Bools, KeptPositions, KVPolicy
from async_rlhf.actors.torch_engine.llama import AttentionPart, LlamaForward, Prefixes
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk


class KeptCache(RowCache):
    """As `RowCache`, with `policy.budget + 1` columns; `KeptPositions` decides which of them are seen."""

    def __init__(self, policy: KVPolicy, slots: int, max_places: int | None = None) -> None:
        super().__init__(slots, max_places=max_places)
        self._width = policy.budget + 1
        self._kept = KeptPositions(policy, slots)

    def begin_kept_chunks(
        self, chunks: Sequence[PrefillChunk], device: torch.device
    ) -> tuple[PaddedChunks, torch.Tensor] | None:
        """The next pass computes these chunks: padded, and bool [K, 1, P, C + P], what their tokens see; None of none."""
        padded = PaddedChunks.of(chunks, device)
        if padded is None:
            return None
        self.reserve(self._width)
        taken = [self._kept.take_chunk(chunk.rows, np.array(chunk.ids), chunk.start) for chunk in chunks]
        place, origin = [], []
        for number, (chunk, written) in enumerate(zip(chunks, taken, strict=True)):
            for row in chunk.rows:
                place.append(np.stack((np.full_like(written.columns, row), written.columns)))
                origin.append(np.stack((np.full_like(written.tokens, number), written.tokens)))
        self._chunks = replace(
            padded,
            place=torch.from_numpy(np.concatenate(place, axis=1)).to(device),
            origin=torch.from_numpy(np.concatenate(origin, axis=1)).to(device),
            writes=(),  # what is kept is no stretch of columns
            sources=torch.tensor([chunk.rows[0] for chunk in chunks], device=device),
        )
        longest = padded.ids.shape[1]
        self._length = self._width + longest
        seen = np.stack([_padded(written.mask, longest, self._width) for written in taken])
        return self._chunks, torch.from_numpy(seen).to(device)[:, None]

    def begin_kept_tokens(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The next pass brings int64 [N] tokens at positions [N], one a row: bool [N, 1, 1, C], what they see."""
        columns, mask = self._kept.take_tokens(tokens.cpu().numpy(), positions.cpu().numpy())
        self.begin_tokens(torch.from_numpy(columns).to(tokens.device), self._width)
        return torch.from_numpy(mask).to(tokens.device)[:, None, None]

    def write_chunks(
        self, layer: int, new_keys: torch.Tensor, new_values: torch.Tensor, chunks: PaddedChunks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store of [K, H, P, D] what stays; returns [K, H, C + P, D] of keys and values to see."""
        seen = []
        for buffers, new in ((self.keys, new_keys), (self.values, new_values)):
            buffer = self._buffer(buffers, layer, new)
            seen.append(torch.cat((buffer[chunks.sources], new), dim=2))
            self._store(buffer, new, chunks)
        return seen[0], seen[1]

    def clear_rows(self, rows: Sequence[int]) -> None:
        self._kept.clear(rows)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Rows `targets` get all that rows `sources` hold; no row may be both."""
        super().copy_rows(sources, targets, self._width)
        self._kept.copy(sources, targets)

    def keep_row(self, row: int, length: int) -> tuple[Any, ...]:
        """All that it holds, copied out."""
        return super().keep_row(row, self._width), self._kept.keep(row)

    def put_row(self, row: int, kept: tuple[Any, ...]) -> None:
        super().put_row(row, kept[0])
        self._kept.put(row, kept[1])

    def reserve(self, length: int, num_rows: int = 0) -> None:
        """As many columns as ever, however long the rows."""
        super().reserve(self._width, num_rows)

    def _columns_for(self, length: int) -> int:
        return self._width


class KeptForward(Forward):
    """`Forward` through the model's own code, for any family whose layers attend to everything before."""

    _cache: KeptCache

    def __call__(
        self, chunks: Sequence[PrefillChunk], tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        begun = self._cache.begin_kept_chunks(chunks, tokens.device)
        if begun is not None:
            padded, seen = begun
            self._pass(padded.ids, padded.positions, self._attention.masks(lambda _: additive(seen, self._model.dtype)))
        seen = self._cache.begin_kept_tokens(tokens, positions)
        masks = self._attention.masks(lambda _: additive(seen, self._model.dtype))
        return self._pass(tokens[:, None], positions[:, None], masks)


class KeptLlamaForward(LlamaForward):
    """`Forward` of plain Llama on a CPU, in one pass."""

    _cache: KeptCache

    def __call__(
        self, chunks: Sequence[PrefillChunk], tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        begun = self._cache.begin_kept_chunks(chunks, tokens.device)
        prefixes = None if begun is None else Prefixes(begun[0], additive(begun[1], torch.float32))
        mask = additive(self._cache.begin_kept_tokens(tokens, positions), torch.float32)
        return self._in_one_pass(
            prefixes, tokens, positions, length, [AttentionPart(slice(0, len(tokens)), self._of_heads(mask))]
        )


def _padded(mask: Bools, longest: int, num_columns: int) -> Bools:
    """[P', C + P'] -> [P, C + P]; what padding sees means nothing, but it must see something."""
    wide = np.zeros((longest, num_columns + longest), np.bool_)
    wide[: len(mask), : mask.shape[1]] = mask
    wide[len(mask) :, num_columns] = True
    return wide
