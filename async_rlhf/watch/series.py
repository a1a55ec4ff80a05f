"""The curves of one run, of bounded length however long the run is. Pure: no files, no clock.

Steps are gathered in buckets of equal width. A bucket keeps the smallest, the mean and the largest value of each metric, so
that a spike of one step among a million is still seen. When a run has outgrown its buckets, each two neighbours become one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

MAX_BUCKETS = 1000
"""More points than a picture of a curve has columns."""
MAX_METRICS = 400
"""Far more than a step has; names that a damaged file invents beyond it are left out."""
MAX_STEP = 10**9
"""A step beyond it is damage."""
_MAX_AGES = 33
"""Ages of tokens that are distinguished in a bucket; all older ones count as the oldest."""


@dataclass
class _Curve:
    """Of one metric: number of the bucket, and what is in it; plain numbers, a fifth of the bytes that objects take."""

    at: array[int] = field(default_factory=lambda: array("q"))
    count: array[int] = field(default_factory=lambda: array("q"))
    total: array[float] = field(default_factory=lambda: array("d"))
    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))

    def add(self, bucket: int, value: float, low: float, high: float, count: int = 1) -> None:
        """value: the sum of `count` values."""
        if self.at and self.at[-1] == bucket:
            self.count[-1] += count
            self.total[-1] += value
            self.low[-1] = min(self.low[-1], low)
            self.high[-1] = max(self.high[-1], high)
            return
        self.at.append(bucket)
        self.count.append(count)
        self.total.append(value)
        self.low.append(low)
        self.high.append(high)

    def halved(self) -> _Curve:
        new = _Curve()
        for at, count, total, low, high in zip(self.at, self.count, self.total, self.low, self.high, strict=True):
            new.add(at // 2, total, low, high, count)
        return new

    def cut(self, bucket: int) -> None:
        """Forget this bucket and all behind it."""
        while self.at and self.at[-1] >= bucket:
            for values in (self.at, self.count):
                values.pop()
            for sums in (self.total, self.low, self.high):
                sums.pop()

    def plain(self, width: int, bucket: int) -> dict[str, list[float]]:
        begin = bisect_left(self.at, bucket)
        return {
            "step": [at * width for at in self.at[begin:]],
            "mean": [total / count for total, count in zip(self.total[begin:], self.count[begin:], strict=True)],
            "min": self.low[begin:].tolist(),
            "max": self.high[begin:].tolist(),
        }


class History:
    """The curves of every metric of a run, and its tokens by age. Steps rise; one that does not takes back those from it on.

    max_buckets: the most points a curve has. width: steps in a bucket, a power of two.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max = max_buckets
        self._curves: dict[str, _Curve] = {}
        self._ages: dict[int, dict[int, int]] = {}
        self._cuts = 0
        self._first_step = MAX_STEP
        self.width = 1
        self.last_step = -1

    @property
    def metrics(self) -> list[str]:
        return list(self._curves)

    @property
    def layout(self) -> str:
        """Changes whenever buckets that were given out are no longer true; else only the last one changes, or new ones come."""
        return f"{self.width}.{self._cuts}"

    def add(self, step: int, values: Mapping[str, float], ages: Mapping[int, int] | None = None) -> None:
        """values: finite numbers by metric. ages: tokens of the step by their staleness."""
        if step <= self.last_step:
            self._cut(step)
        self.last_step = step
        self._first_step = min(step, self._first_step)
        while step // self.width - self._first_step // self.width >= self._max:
            self._halve()
        bucket = step // self.width
        for name, value in values.items():
            if (curve := self._curves.get(name)) is None:
                if len(self._curves) >= MAX_METRICS:
                    continue
                curve = self._curves[name] = _Curve()
            curve.add(bucket, value, value, value)
        if ages:
            known = self._ages.setdefault(bucket, {})
            for age, tokens in ages.items():
                age = min(max(age, 0), _MAX_AGES - 1)
                known[age] = known.get(age, 0) + tokens

    def after(self, metrics: Iterable[str], step: int = 0, layout: str = "") -> dict[str, Any]:
        """Ready for JSON: what has changed for a reader that knows the buckets of this layout up to this step; or all of it.

        metrics: whose curves are given. from: the first step that is given; what the reader has from there on is replaced.
        """
        bucket = step // self.width if layout == self.layout else 0
        ages = sorted(at for at in self._ages if at >= bucket)
        return {
            "layout": self.layout,
            "width": self.width,
            "from": bucket * self.width,
            "last": self.last_step,
            "curves": {name: self._curves[name].plain(self.width, bucket) for name in metrics if name in self._curves},
            "ages": {"step": [at * self.width for at in ages], "tokens": [self._ages[at] for at in ages]},
        }

    def _halve(self) -> None:
        self.width *= 2
        self._curves = {name: curve.halved() for name, curve in self._curves.items()}
        ages: dict[int, dict[int, int]] = {}
        for at, counts in self._ages.items():
            known = ages.setdefault(at // 2, {})
            for age, tokens in counts.items():
                known[age] = known.get(age, 0) + tokens
        self._ages = ages

    def _cut(self, step: int) -> None:
        """A learner that goes on from a checkpoint makes these steps again; earlier ones of the same bucket go too."""
        self._cuts += 1
        for curve in self._curves.values():
            curve.cut(step // self.width)
        self._ages = {at: counts for at, counts in self._ages.items() if at < step // self.width}


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record of a step; `null`, text and what is out of a float's range are left out."""
    return {name: float(value) for name, value in record.items() if is_number(value)}


def is_number(value: object) -> TypeGuard[int | float]:
    """Of finite size; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e150 and math.isfinite(value)


def ages(record: Mapping[str, Any]) -> dict[int, int]:
    """Tokens of a step by staleness, as `staleness/histogram` has them."""
    found = record.get("staleness/histogram")
    if not isinstance(found, dict):
        return {}
    return {int(age[:9]): int(n) for age, n in found.items() if isinstance(age, str) and age.isdecimal() and is_number(n)}
