"""The curves of one run, of bounded length however long the run is. Pure: no files, no clock.

Steps are gathered in buckets of equal width. A bucket keeps the smallest, the mean and the largest value of each metric, so
that a spike of one step among a million is still seen. When a run has outgrown its buckets, each two neighbours become one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

MAX_BUCKETS = 1000
"""More points than a picture of a curve has columns."""
MAX_METRICS = 400
"""Far more than a step has; names that a damaged file invents beyond it are left out."""
MAX_STEP = 10**9
"""A step beyond it is damage."""
_MAX_AGES = 33
"""Ages of tokens that are distinguished in a bucket; all older ones count as the oldest."""
_COUNT, _SUM, _LOW, _HIGH = range(4)
_NOTHING = np.array([[0.0], [0.0], [math.inf], [-math.inf]])


class History:
    """The curves of every metric of a run, and its tokens by age. Steps rise; one that does not takes back those from it on.

    max_buckets: the most points a curve has. width: steps in a bucket, a power of two. A curve is an array [4, max_buckets] of
    the count, sum, smallest and largest value in each bucket from that of the first step on.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max = max_buckets
        self._curves: dict[str, NDArray[np.float64]] = {}
        self._ages: dict[int, NDArray[np.float64]] = {}
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

    @property
    def _first(self) -> int:
        return self._first_step // self.width

    def add(self, step: int, values: Mapping[str, float], ages: Mapping[int, int] | None = None) -> None:
        """values: finite numbers by metric. ages: tokens of the step by their staleness."""
        if step <= self.last_step:
            self._cut(step)
        self.last_step = step
        self._first_step = step if self._first_step == MAX_STEP else self._first_step
        while step // self.width - self._first >= self._max:
            self._halve()
        for name, value in values.items():
            if name in self._curves or len(self._curves) < MAX_METRICS:
                self._put(self._curves.setdefault(name, self._empty), step, value)
        for age, tokens in (ages or {}).items():
            self._put(self._ages.setdefault(min(max(age, 0), _MAX_AGES - 1), self._empty), step, tokens)

    def after(self, metrics: Iterable[str], step: int = 0, layout: str = "") -> dict[str, Any]:
        """Ready for JSON: what has changed for a reader that knows the buckets of this layout up to this step; or all of it.

        metrics: whose curves are given. from: the first step that is given; what the reader has from there on is replaced.
        """
        begin = step // self.width if layout == self.layout else 0
        cut = max(0, begin - self._first)
        tokens = {age: curve[_SUM, cut:] for age, curve in self._ages.items()}
        there: list[int] = np.flatnonzero(sum(tokens.values())).tolist() if tokens else []
        return {
            "layout": self.layout,
            "width": self.width,
            "from": begin * self.width,
            "last": self.last_step,
            "curves": {name: self._plain(self._curves[name], cut) for name in metrics if name in self._curves},
            "ages": {
                "step": [(self._first + cut + at) * self.width for at in there],
                "tokens": [{age: int(counts[at]) for age, counts in sorted(tokens.items()) if counts[at]} for at in there],
            },
        }

    @property
    def _empty(self) -> NDArray[np.float64]:
        return np.repeat(_NOTHING, self._max, axis=1)

    def _put(self, curve: NDArray[np.float64], step: int, value: float) -> None:
        bucket = curve[:, step // self.width - self._first]
        bucket[_COUNT] += 1
        bucket[_SUM] += value
        bucket[_LOW] = min(bucket[_LOW], value)
        bucket[_HIGH] = max(bucket[_HIGH], value)

    def _plain(self, curve: NDArray[np.float64], cut: int) -> dict[str, list[float]]:
        there = cut + np.flatnonzero(curve[_COUNT, cut:])
        count, total, low, high = curve[:, there]
        steps = (self._first + there) * self.width
        return {"step": steps.tolist(), "mean": (total / count).tolist(), "min": low.tolist(), "max": high.tolist()}

    def _halve(self) -> None:
        odd = self._first % 2  # the first bucket is then the second of its pair
        self.width *= 2
        for curves in (self._curves, self._ages):
            for curve in curves.values():
                pairs = np.hstack([np.repeat(_NOTHING, odd, axis=1), curve, np.repeat(_NOTHING, 2 - odd, axis=1)])
                one, other = pairs[:, 0:-1:2], pairs[:, 1::2]
                merged = np.vstack([one[:2] + other[:2], np.minimum(one[2], other[2]), np.maximum(one[3], other[3])])
                curve[:] = _NOTHING
                curve[:, : min(self._max, merged.shape[1])] = merged[:, : self._max]

    def _cut(self, step: int) -> None:
        """A learner that goes on from a checkpoint makes these steps again; earlier ones of the same bucket go too."""
        self._cuts += 1
        for curve in (*self._curves.values(), *self._ages.values()):
            curve[:, max(0, step // self.width - self._first) :] = _NOTHING
        self._first_step = min(step, self._first_step)


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
