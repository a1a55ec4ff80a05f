"""The curves of one run, of bounded length however long the run is. Pure: no files, no clock.

Steps are gathered in buckets of equal width. A bucket keeps the smallest, the mean and the largest value of each metric, so
that a spike of one step among a million is still seen. When a run has outgrown its buckets, each two neighbours become one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_rlhf.run.run_files import is_number

MAX_BUCKETS = 1000
"""More points than a picture of a curve has columns."""
MAX_METRICS = 400
"""Far more than a step has; names that a damaged file invents beyond it are left out."""
MAX_STEP = 10**9
"""A step beyond it is damage."""
_MAX_AGES = 33
"""Ages of tokens that are distinguished in a bucket; all older ones count as the oldest."""
_COUNT, _SUM, _LOW, _HIGH = range(4)
_NOTHING = np.array([0.0, 0.0, math.inf, -math.inf]).reshape(4, 1, 1)


class _SeriesTable:
    """Curves by name: an array [4, curves, buckets] of the count, sum, smallest and largest value in each bucket."""

    def __init__(self, max_buckets: int, max_curves: int) -> None:
        self._max = max_curves
        self.rows: dict[Any, int] = {}
        self.cells = np.tile(_NOTHING, (1, 0, max_buckets))

    def add(self, bucket: int, values: Mapping[Any, float]) -> None:
        for name in values:
            if name not in self.rows and len(self.rows) < self._max:
                self.rows[name] = len(self.rows)
        if (more := len(self.rows) - self.cells.shape[1]) > 0:
            self.cells = np.concatenate([self.cells, np.tile(_NOTHING, (1, more, self.cells.shape[2]))], axis=1)
        kept = {self.rows[name]: value for name, value in values.items() if name in self.rows}
        rows, new = list(kept), np.fromiter(kept.values(), float, len(kept))
        self.cells[_COUNT, rows, bucket] += 1
        self.cells[_SUM, rows, bucket] += new
        self.cells[_LOW, rows, bucket] = np.minimum(self.cells[_LOW, rows, bucket], new)
        self.cells[_HIGH, rows, bucket] = np.maximum(self.cells[_HIGH, rows, bucket], new)

    def halve(self, odd: int) -> None:
        """Each two neighbours become one. odd: 1 where the first bucket is the second of its pair."""
        _, curves, buckets = self.cells.shape
        empty = np.tile(_NOTHING, (1, curves, 2))
        pairs = np.concatenate([empty[:, :, :odd], self.cells, empty[:, :, odd:]], axis=2)
        one, other = pairs[:, :, 0:-1:2], pairs[:, :, 1::2]
        merged = np.stack([*(one[:2] + other[:2]), np.minimum(one[2], other[2]), np.maximum(one[3], other[3])])
        self.cells = np.tile(_NOTHING, (1, curves, buckets))
        self.cells[:, :, : merged.shape[2]] = merged

    def cut(self, bucket: int) -> None:
        """Forget this bucket and all behind it."""
        self.cells[:, :, bucket:] = _NOTHING


class MetricHistory:
    """The curves of every metric of a run, and its tokens by age. Steps rise; one that does not takes back those from it on.

    max_buckets: the most points a curve has. width: steps in a bucket, a power of two. The first bucket is that of the first
    step.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max = max_buckets
        self._curves, self._ages = _SeriesTable(max_buckets, MAX_METRICS), _SeriesTable(max_buckets, _MAX_AGES)
        self._cuts = 0
        self._first_step = MAX_STEP
        self.width = 1
        self.last_step = -1

    @property
    def metrics(self) -> list[str]:
        return list(self._curves.rows)

    @property
    def layout(self) -> str:
        """Changes whenever earlier buckets are no longer valid; else only the last one changes, or new ones come."""
        return f"{self.width}.{self._cuts}"

    def add(self, step: int, values: Mapping[str, float], ages: Mapping[int, int] | None = None) -> None:
        """values: finite numbers by metric. ages: tokens of the step by their staleness."""
        if step <= self.last_step:
            # a learner that goes on from a checkpoint makes these steps again; earlier ones of the same bucket go too
            self._cuts += 1
            for table in (self._curves, self._ages):
                table.cut(max(0, self._bucket(step)))
            self._first_step = min(step, self._first_step)
        self.last_step = step
        self._first_step = step if self._first_step == MAX_STEP else self._first_step
        while self._bucket(step) >= self._max:
            odd = self._first_step // self.width % 2
            self.width *= 2
            for table in (self._curves, self._ages):
                table.halve(odd)
        self._curves.add(self._bucket(step), values)
        counts: dict[int, int] = {}
        for age, tokens in (ages or {}).items():
            age = min(max(age, 0), _MAX_AGES - 1)
            counts[age] = counts.get(age, 0) + tokens
        self._ages.add(self._bucket(step), counts)

    def after(self, metrics: Iterable[str], step: int = 0, layout: str = "") -> dict[str, Any]:
        """Ready for JSON: what has changed for a reader that knows the buckets of this layout up to this step; or all of it.

        metrics: whose curves are given. from: the first step that is given; what the reader has from there on is replaced.
        """
        begin = step // self.width * self.width if layout == self.layout else 0
        cut = max(0, self._bucket(begin))
        ages = self._ages.cells[_SUM, :, cut:]
        there = np.flatnonzero(ages.any(axis=0))
        return {
            "layout": self.layout,
            "width": self.width,
            "from": begin,
            "last": self.last_step,
            "curves": {name: self._plain(self._curves.rows[name], cut) for name in metrics if name in self._curves.rows},
            "ages": {
                "step": self._steps(cut + there),
                "tokens": [{age: int(ages[row, at]) for age, row in self._ages.rows.items() if ages[row, at]} for at in there],
            },
        }

    def _bucket(self, step: int) -> int:
        return step // self.width - self._first_step // self.width

    def _steps(self, buckets: NDArray[np.int64]) -> list[int]:
        found: list[int] = ((self._first_step // self.width + buckets) * self.width).tolist()
        return found

    def _plain(self, row: int, cut: int) -> dict[str, list[Any]]:
        there = cut + np.flatnonzero(self._curves.cells[_COUNT, row, cut:])
        count, total, low, high = self._curves.cells[:, row, there]
        return {"step": self._steps(there), "mean": (total / count).tolist(), "min": low.tolist(), "max": high.tolist()}


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record of a step; `null`, text and what is out of a float's range are left out."""
    return {name: float(value) for name, value in record.items() if is_number(value)}


def ages(record: Mapping[str, Any]) -> dict[int, int]:
    """Tokens of a step by staleness, as `staleness/histogram` has them."""
    found = record.get("staleness/histogram")
    if not isinstance(found, dict):
        return {}
    return {int(age[:9]): int(n) for age, n in found.items() if isinstance(age, str) and age.isdecimal() and is_number(n)}
