"""Which keys and values stay when a row may only keep so many: decisions, without a tensor.

When the token at position t is computed it attends to, and its row then keeps,

    sinks             positions 0 .. sinks - 1
    window            positions t - window + 1 .. t
    representatives   of the positions between: the newest `representatives` that stand for a chunk

A chunk ends with a token of `ends`, or with its `chunk`-th token; its first token stands for it. Its last (SepLLM, Chen et al.
2024, arXiv 2412.12094) was measured to be worth less: `experiments/results/kv_policy`. Without representatives this is
StreamingLLM (Xiao et al. 2023, arXiv 2309.17453); but positions stay those of the text, where that counts them in the cache.

What is kept at t depends on the tokens up to t alone, prompt and completion alike, and never grows beyond `budget`. So a prefix
that is computed again, in chunks of any size, ends with the same keys and values, and the whole is one pass with a mask
(`KVPolicy.mask`). An evicted token's key and value were computed while it could be seen, as was what it left in later ones.

`KeptPositions` follows the rows of an engine: which position lies in which column of the cache.

Axes: `R` rows of the cache, `N` running rows, `V` vocabulary, `T` tokens, `P` tokens of a chunk of a prefix, `C` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

# In place of a position: the column is empty. In place of an ordinal: the token stands for no chunk.
_NONE = -1


@dataclass(frozen=True, eq=False)
class KVPolicy:
    """ends: bool [V], the tokens that end a chunk. `representatives = 0`: `ends` and `chunk` mean nothing."""

    sinks: int
    window: int
    representatives: int
    chunk: int
    ends: Bools

    @property
    def budget(self) -> int:
        """The most tokens whose keys and values are kept."""
        return self.sinks + self.window + self.representatives

    def stand(self, ids: Integers, open_tokens: Integers) -> tuple[Bools, Integers]:
        """For one more token in each of N rows whose open chunks have so many: bool [N], whether it stands for its chunk, and
        int64 [N], what the open chunk has then (0: it has ended)."""
        ended = self.ends[ids] | (open_tokens + 1 == self.chunk)
        return open_tokens == 0, np.where(ended, 0, open_tokens + 1)

    def visible(self, at: Integers, positions: Integers, ordinals: Integers) -> Bools:
        """bool [..., P, C]: which columns are seen from the tokens at [..., P].

        positions, ordinals: [..., C] of each column; an ordinal counts what stands for a chunk behind the sinks. All that is
        still seen at the first of the tokens must be among the columns.
        """
        at, positions, ordinals = at[..., None], positions[..., None, :], ordinals[..., None, :]
        beyond = positions <= at - self.window
        standing = np.where(beyond, ordinals, _NONE)
        newest = standing.max(axis=-1, keepdims=True)
        represents = (standing != _NONE) & (standing > newest - self.representatives)
        seen: Bools = (positions != _NONE) & (positions <= at) & (~beyond | (positions < self.sinks) | represents)
        return seen

    def mask(self, ids: Integers) -> Bools:
        """bool [T, T] of a whole row: which tokens each token attends to."""
        rows = KeptPositions(self, 1)
        at = np.arange(len(ids))
        return self.visible(at, at, rows.ordinals_of(0, ids, at))


def ending(texts: Sequence[str], ends: Sequence[str]) -> Bools:
    """bool [V]: which tokens, given as texts, end with one of `ends`, spaces behind it aside."""
    return np.array([text.endswith(tuple(ends)) or text.rstrip(" ").endswith(tuple(ends)) for text in texts], np.bool_)


class WrittenChunk(NamedTuple):
    """mask: bool [P, C + P], what each token of a chunk sees of the columns and of the chunk. columns, tokens: int64 [W], of
    what stays at its end: where it goes, and which token of the chunk it is."""

    mask: Bools
    columns: Integers
    tokens: Integers


class KeptPositions:
    """Owns what lies where: positions, ordinals, int64 [R, C]. The last column is a spare one, in which nothing is kept.

    A row that is not yet computed up to its newest token does not take it: that token goes into the spare column.
    """

    def __init__(self, policy: KVPolicy, num_rows: int) -> None:
        self.policy = policy
        self._positions = np.full((num_rows, policy.budget + 1), _NONE, np.int64)
        self._ordinals = self._positions.copy()
        self._lengths, self._open, self._stood = (np.zeros(num_rows, np.int64) for _ in range(3))

    @property
    def _state(self) -> tuple[Integers, ...]:
        return self._positions, self._ordinals, self._lengths, self._open, self._stood

    def clear(self, rows: Sequence[int]) -> None:
        """These rows begin anew."""
        for array, empty in zip(self._state, (_NONE, _NONE, 0, 0, 0), strict=True):
            array[rows] = empty

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows `targets` hold what rows `sources` hold, in the same columns."""
        for array in self._state:
            array[targets] = array[sources]

    def keep(self, row: int) -> tuple[Integers, ...]:
        """A copy of a row's state, to be put into another row later."""
        return tuple(array[row].copy() for array in self._state)

    def put(self, row: int, kept: Sequence[Integers]) -> None:
        """`row` holds what `keep` copied out of another."""
        for array, part in zip(self._state, kept, strict=True):
            array[row] = part

    def take_chunk(self, rows: Sequence[int], ids: Integers, start: int) -> WrittenChunk:
        """The tokens at `start`, `start + 1`, ... of rows that hold the same."""
        first, at = rows[0], np.arange(start, start + len(ids))
        assert self._lengths[first] == start, f"row {first} holds {self._lengths[first]} tokens, the chunk begins at {start}"
        ordinals = self.ordinals_of(first, ids, at)
        width = self._positions.shape[1]
        mask = self.policy.visible(at, np.append(self._positions[first], at), np.append(self._ordinals[first], ordinals))
        tokens = np.flatnonzero(mask[-1, width:])
        columns = np.flatnonzero(~mask[-1, : width - 1])[: len(tokens)]
        self._positions[first, columns], self._ordinals[first, columns] = at[tokens], ordinals[tokens]
        self._lengths[first] += len(ids)
        self.copy([first] * (len(rows) - 1), list(rows[1:]))
        return WrittenChunk(mask, columns, tokens)

    def take_tokens(self, ids: Integers, at: Integers) -> tuple[Integers, Bools]:
        """One token in each of the first N rows, int64 [N] at positions [N]: int64 [N], the column it goes into, and bool
        [N, C], what it sees then, itself included."""
        num_rows = len(at)
        mask = self.policy.visible(at[:, None], self._positions[:num_rows], self._ordinals[:num_rows])[:, 0]
        columns = np.full(num_rows, self._positions.shape[1] - 1)
        ready = np.flatnonzero(self._lengths[:num_rows] == at)
        columns[ready] = (~mask[ready, :-1]).argmax(axis=1)
        mask[ready, columns[ready]] = True
        self._positions[ready, columns[ready]] = at[ready]
        self._ordinals[ready, columns[ready]] = self._count(ready, ids[ready], at[ready])
        self._lengths[ready] += 1
        return columns, mask

    def ordinals_of(self, row: int, ids: Integers, at: Integers) -> Integers:
        """int64 [P] of the next tokens of a row, which has taken them then."""
        each = np.array([row])
        return np.array([self._count(each, ids[index : index + 1], at[index : index + 1])[0] for index in range(len(ids))])

    def _count(self, rows: Integers, ids: Integers, at: Integers) -> Integers:
        """int64 [N], the ordinal of one more token in each of these rows."""
        stands, self._open[rows] = self.policy.stand(ids, self._open[rows])
        stands = stands & (at >= self.policy.sinks)
        ordinals = np.where(stands, self._stood[rows], _NONE)
        self._stood[rows] += stands
        return ordinals
