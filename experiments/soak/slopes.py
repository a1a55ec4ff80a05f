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
from itertools import groupby

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
    by_life = groupby(sorted(samples, key=lambda sample: sample.life), key=lambda sample: sample.life)
    blocks = [_blocks([*life], warm_up_h) for _, life in by_life]
    moves = [np.diff(means, axis=0) for means in blocks if len(means) > 1]
    count = sum(map(len, moves))
    if count < MIN_DIFFERENCES:
        return None
    steps, growth = map(float, np.concatenate(moves).sum(0))
    if steps <= 0:
        return None
    mean = growth / steps
    residuals = [moved[:, 1] - mean * moved[:, 0] for moved in moves]
    half = half_interval(math.sqrt(_variance(residuals, count) * count / (count - 1)) / steps, count - 1)
    return Slope(mean, mean - half, mean + half, count, len(moves))


def _blocks(life: Sequence[SlopeSample], warm_up_h: float) -> Array:
    """[blocks, 2]: means of the steps and of the value, of whole blocks behind the warm-up."""
    warm = [(sample.steps, sample.value) for sample in life if sample.hours - life[0].hours >= warm_up_h]
    whole = len(warm) // BLOCK
    means: Array = np.array(warm[: whole * BLOCK], np.float64).reshape(whole, BLOCK, 2).mean(1)
    return means


def _variance(residuals: Sequence[Array], count: int) -> float:
    """Variance of the sum of all residuals; those of two lives are independent."""
    lags = int(4 * (count / 100) ** (2 / 9))
    total = 0.0
    for life in residuals:
        total += float(life @ life)
        for lag in range(1, min(lags, len(life) - 1) + 1):
            total += 2 * (1 - lag / (lags + 1)) * float(life[lag:] @ life[:-lag])
    return max(total, 0.0)
