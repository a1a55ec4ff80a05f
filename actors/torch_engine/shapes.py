"""Which shapes of a computation give an item the bits that one shape, the base, gives it.

A library chooses how to add by the shape of a product, and no library promises where it chooses otherwise. So a batch is
computed in a shape only after that shape has given equal items the bits of the base (`Sizes`), once, when it is first met;
what fails is computed in blocks of the base. Columns are a request's own: `choose_columns` compares shapes at the start, and
where they differ, all columns are computed in blocks of one size.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_log = logging.getLogger(__name__)

# So many equal items -> tensors, in each of which the first axis is of items.
Compute = Callable[[int], Sequence[torch.Tensor]]

# Items of a block are so many, or fewer by a step of a half or a quarter: what is padded stays below a third.
LARGEST = 256
_SIZES = sorted({size for power in range(9) for size in (1 << power, 3 << power >> 1) if size <= LARGEST} | {80, 112, 160, 224})
_TRIED = 3
# Shapes that a base may have: one item alone cannot depend on its place.
_BASES = (16, 1)


class Sizes:
    """Numbers of items that may be computed together. compute: any items that are as good as those to come."""

    def __init__(self, compute: Compute, bases: Sequence[int] = _BASES) -> None:
        self._compute = compute
        self._base = next((base for base in bases if _alike(compute(base))), 1)
        self._holds = {self._base: True}

    def holds(self, size: int) -> bool:
        """Whether each of `size` items gets the bits of the base."""
        if size not in self._holds:
            base = self._compute(self._base)
            self._holds[size] = _alike(
                [torch.cat((one[:1], more)) for one, more in zip(base, self._compute(size), strict=True)]
            )
            if not self._holds[size]:
                _log.info("batch invariance: %d together round otherwise than %d; blocks of %d", size, self._base, self._base)
        return self._holds[size]

    def blocks(self, count: int) -> list[int]:
        """Sizes of blocks that hold `count` items, the last of them perhaps some more."""
        whole = count // LARGEST if self.holds(LARGEST) else 0
        rest = count - whole * LARGEST
        first = bisect_left(_SIZES, rest)
        found = [size for size in _SIZES[first : first + _TRIED] if rest and self.holds(size)][:1]
        return [LARGEST] * whole + (found or [self._base] * -(-rest // self._base))


def _alike(outputs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(each, each[:1].expand_as(each)) for each in outputs)


@dataclass(frozen=True)
class Columns:
    """The widths of attention's blocks."""

    block: int
    """Columns whose scores are normalised together."""
    values: int
    """Columns that one product adds up."""
    sizes: tuple[int, ...]
    """Sizes of a block that is not full, ascending."""

    def padded(self, length: int) -> int:
        """Columns that are computed for so many visible ones."""
        whole, rest = divmod(length, self.block)
        return whole * self.block + (self.sizes[bisect_left(self.sizes, rest)] if rest else 0)


# Of columns: what every number of them is a multiple of at least, what the shortest row may cost, and the safe block.
STEP, SAFE = 16, 64
MOST_COLUMNS, _VALUES = 2048, 128

# Columns, and how many of them are visible -> what is attended to, any shape.
Attended = Callable[[Columns, int, int], torch.Tensor]


def choose_columns(attended: Attended, longest: int) -> Columns:
    """The largest block in which numbers of columns, a sixteenth of their size apart, give the bits that all of it give, when
    those beyond the visible ones have the weight 0; else whole blocks of `SAFE`."""
    block = min(MOST_COLUMNS, -(-longest // SAFE) * SAFE)
    for values in (block, min(block, _VALUES)):
        columns, sizes = Columns(block, values, (block,)), [0]
        for size in _grid(block):
            if size - sizes[-1] > max(SAFE, sizes[-1] // 4):
                break
            if _same(attended, columns, size):
                sizes.append(size)
        if sizes[-1] == block:
            return Columns(block, values, tuple(sizes[1:]))
    return Columns(SAFE, SAFE, (SAFE,))


def _grid(block: int) -> list[int]:
    sizes, size = [], 0
    while size < block:
        size = min(block, size + max(STEP, 1 << max(0, (size + 1).bit_length() - 5)))
        sizes.append(size)
    return sizes


def _same(attended: Attended, columns: Columns, size: int) -> bool:
    visible = {size, size - STEP + 1, 3}
    return all(torch.equal(attended(columns, size, each), attended(columns, columns.block, each)) for each in visible)
