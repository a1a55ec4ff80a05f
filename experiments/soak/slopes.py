"""How fast a measure of a process grows, with an interval; pure.

A process that is started again begins a new life at another level, and the first moments of a life fill caches: they are left
out. The rest of a life is cut into blocks, whose means differ by what the process has grown and by noise. The slope is the
growth over all lives divided by the steps over all lives, a ratio estimate; nothing is compared between two lives.

Its standard error is that of the residuals between neighbouring blocks, with Bartlett's weights for residuals that are not
independent (Newey and West 1987, "A simple, positive semi-definite, heteroskedasticity and autocorrelation consistent
covariance matrix"), lags up to 4 (n / 100)^(2/9), and Student's t. It is honest for a random walk, as an allocator makes one,
and too wide rather than too narrow for noise about a level, a sawtooth for one, whose residuals cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from async_rlhf.experiments.statistics import Array, half_interval

BLOCK = 10
"""Samples whose mean is one point."""
# Fewer differences have an interval that rests on luck.
MIN_DIFFERENCES = 5


@dataclass(frozen=True)
class SlopeSample:
    """A measure at a moment. life: which start of the process it belongs to. hours: since the begin of the measurement. steps:
    trained so far, in thousands. value: in the unit of the measure."""

    life: int
    hours: float
    steps: float
    value: float


@dataclass(frozen=True)
class Slope:
    """In units of the measure per thousand steps, with its 95 % interval. count: differences it rests on; lives: in
    how many lives of the process they lie."""

    mean: float
    low: float
    high: float
    count: int
    lives: int

    def verdict(self, limit: float) -> str:
        """flat: the whole interval lies below the limit. grows: all of it lies above 0. Otherwise growth is neither shown nor
        ruled out."""
        if self.high <= limit:
            return "flat"
        return "grows" if self.low > 0 else "no growth shown"


def slope(samples: Iterable[SlopeSample], *, warm_up_h: float) -> Slope | None:
    """The growth of a measure; None where too little was seen.

    samples: in the order of time. warm_up_h: what is left out of each life, in hours.
    """
    moved: list[Array] = []
    grown: list[Array] = []
    for _, life in groupby(sorted(samples, key=lambda each: each.life), key=lambda each: each.life):
        points = _blocks([*life], warm_up_h)
        if len(points) > 1:
            steps = np.array([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)])
            moved.append(steps[:, 0])
            grown.append(steps[:, 1])
    count = sum(map(len, moved))
    whole = sum(float(each.sum()) for each in moved)
    if count < MIN_DIFFERENCES or whole <= 0:
        return None
    mean = sum(float(each.sum()) for each in grown) / whole
    residuals = [y - mean * x for x, y in zip(moved, grown, strict=True)]
    error = math.sqrt(_variance(residuals, count) * count / (count - 1)) / whole
    half = half_interval(error, count - 1)
    return Slope(mean, mean - half, mean + half, count, len(moved))


def _blocks(life: Sequence[SlopeSample], warm_up_h: float) -> list[tuple[float, float]]:
    """Means of the steps and of the value, of whole blocks behind the warm-up."""
    warm = [each for each in life if each.hours - life[0].hours >= warm_up_h]
    found = []
    for begin in range(0, len(warm) - BLOCK + 1, BLOCK):
        part = warm[begin : begin + BLOCK]
        found.append((sum(each.steps for each in part) / BLOCK, sum(each.value for each in part) / BLOCK))
    return found


def _variance(residuals: Sequence[Array], count: int) -> float:
    """Variance of the sum of all residuals; those of two lives are independent."""
    lags = int(4 * (count / 100) ** (2 / 9))
    total = 0.0
    for each in residuals:
        total += float(each @ each)
        for lag in range(1, min(lags, len(each) - 1) + 1):
            total += 2 * (1 - lag / (lags + 1)) * float(each[lag:] @ each[:-lag])
    return max(total, 0.0)
