"""Neighbouring rows that attend together: each segment reads its cache only as far as its longest row.

Lengths of running sequences differ much, and reading keys and values is most of what decoding costs when they do; but each
segment costs some operations of its own. Pure; no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Rows are looked at in blocks of so many; what a segment costs beside reading, in rows x columns (measured on two cores).
BLOCK, COST = 4, 128


class Segment(NamedTuple):
    """Rows start .. stop - 1, of which none has more than `length` tokens."""

    start: int
    stop: int
    length: int


def segments(positions: Sequence[int]) -> list[Segment]:
    """Segments of all rows in order; positions: index of each row's last token. A block joins the segment before it when
    that costs no more than a segment of its own."""
    found: list[Segment] = []
    for start in range(0, len(positions), BLOCK):
        stop = min(start + BLOCK, len(positions))
        block = Segment(start, stop, max(positions[start:stop]) + 1)
        if found and _cost(joined := _join(found[-1], block)) <= _cost(found[-1]) + _cost(block):
            found[-1] = joined
        else:
            found.append(block)
    return found


def _join(before: Segment, after: Segment) -> Segment:
    return Segment(before.start, after.stop, max(before.length, after.length))


def _cost(segment: Segment) -> int:
    return (segment.stop - segment.start) * segment.length + COST
