"""Statistics over seeds: paired intervals, many comparisons at once, power, and the words that an interval carries.

Pure. Two settings are compared within a seed, which has the same task, the same initial policy and the same random
numbers in both: what seeds have in common leaves the difference. Called by every experiment that has seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import ConfigError

try:
    from scipy.special import stdtr, stdtrit  # Student's t: chance of a value and degrees, and the value of a chance
except ModuleNotFoundError as error:
    raise ConfigError("intervals over seeds need scipy: pip install 'async-rlhf[experiments]'") from error

Key = TypeVar("Key")
Array = npt.NDArray[np.float64]
# Two seeds have an interval of 12.7 standard errors that rests on one difference: it is not worth printing.
MIN_SEEDS = 3
LEVEL = 0.05
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Mean:
    """Over seeds. low and high: the 95 % interval; p: two-sided, from 0, smaller than LEVEL when and only when the interval
    leaves 0 out. With fewer than MIN_SEEDS seeds p is None, and low and high are the range of the seeds. deviation: standard
    deviation of what was averaged, nan of a single number."""

    mean: float
    low: float
    high: float
    count: int
    p: float | None
    deviation: float = math.nan
    adjusted: float | None = None
    """p after Holm over all that it was compared with others in; None where it was not."""

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width, where there is one."""
        return None if self.p is None else (self.high - self.low) / 2

    @property
    def detectable(self) -> float | None:
        """The smallest that so many seeds show four times in five; None with a single one, by which nothing can be told from
        chance."""
        return detectable(self.deviation, self.count) if self.count > 1 and not math.isnan(self.deviation) else None


def estimate(values: Iterable[float | None]) -> Mean | None:
    """The mean of what was measured, which is neither None nor NaN; None when nothing was."""
    numbers = np.array([*values], np.float64)
    known = numbers[~np.isnan(numbers)]
    return paired(known, np.zeros(len(known))) if len(known) else None


def paired(after: Sequence[float] | Array, before: Sequence[float] | Array) -> Mean:
    """The difference of two settings, by seed: `after[i]` and `before[i]` have the same seed. Raises ValueError where they
    cannot.

    The t interval and the p of the t test, which is the level of the interval that just touches 0. Not the bootstrap: a mean of
    few resampled seeds cannot leave their range, so it leaves out the truth too often. Not the permutation of signs: five seeds
    have 32, of which none has a p below 0.0625.
    """
    if len(after) != len(before) or not len(after):
        raise ValueError(
            f"{len(after)} and {len(before)} values cannot be paired: as many seeds are needed in both, and at least one"
        )
    gaps = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean, count = float(gaps.mean()), len(gaps)
    deviation = float(gaps.std(ddof=1)) if count > 1 else math.nan
    if count < MIN_SEEDS:
        return Mean(mean, float(gaps.min()), float(gaps.max()), count, None, deviation)
    error = deviation / math.sqrt(count)
    half = half_interval(error, count - 1)
    t = abs(mean) / error if error > 0 else (math.inf if mean else 0.0)
    return Mean(mean, mean - half, mean + half, count, 2 * float(stdtr(count - 1, -t)), deviation)


def half_interval(error: float, degrees: int) -> float:
    """Half the width of the 95 % t interval of a mean with this standard error."""
    return float(stdtrit(degrees, 1 - LEVEL / 2)) * error


def adjusted(found: Mapping[Key, Mean]) -> dict[Key, Mean]:
    """The same, with Holm's p over all that have one."""
    judged = {name: each.p for name, each in found.items() if each.p is not None}
    after = dict(zip(judged, holm(list(judged.values())), strict=True))
    return {name: replace(each, adjusted=after.get(name)) for name, each in found.items()}


def first_at(x: Array, y: Array, level: float) -> float:
    """y where x first reaches the level, which it does somewhere; between two points on the line that joins them."""
    after = int(np.argmax(x >= level))
    if after == 0:
        return float(y[0])
    share = (level - x[after - 1]) / (x[after] - x[after - 1])
    return float(y[after - 1] + share * (y[after] - y[after - 1]))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p value of each comparison that holds when all of them are looked at.

    Holm 1979, "A simple sequentially rejective multiple test procedure": the i-th smallest of m is multiplied by m - i + 1, and
    none is below one that was smaller. The chance that any true equality gets a value below a level is at most that level.
    """
    order = np.argsort(p_values, kind="stable")
    in_order = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.minimum(in_order, 1.0))
    return adjusted.tolist()


def detectable(deviation: float, count: int, power: float = 0.8) -> float:
    """The smallest true difference that `count` seeds show (at LEVEL, two-sided) with a chance of at least `power`.

    deviation: standard deviation of the paired differences. (t_{1 - level / 2} + t_power) deviation / sqrt(n), which is exact
    up to the difference between a shifted t and a non-central one. count: at least 2.
    """
    return float(stdtrit(count - 1, 1 - LEVEL / 2) + stdtrit(count - 1, power)) * deviation / math.sqrt(count)


def seeds_needed(deviation: float, difference: float, power: float = 0.8) -> int:
    """The fewest seeds that show a difference of this size, which is positive, with a chance of at least `power`."""
    # at least so many, for the quantiles of t are above those of the normal distribution
    count = max(2, math.floor(((_NORMAL.inv_cdf(1 - LEVEL / 2) + _NORMAL.inv_cdf(power)) * deviation / difference) ** 2))
    while detectable(deviation, count, power) > difference:
        count += 1
    return count


def worded(what: str, base: str, found: Mean, comparisons: int) -> str:
    """The sentence that an interval carries, and no more: `what` against `base`; `found.adjusted` is over `comparisons`."""
    numbers = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    if found.p is None:
        return f"{what} against {base}: {numbers} is the range of {found.count} seeds, too few for an interval."
    if found.p < LEVEL:
        side = "above" if found.mean > 0 else "below"
        if found.adjusted is None or found.adjusted < LEVEL:
            return f"{what} lies {side} {base}: {numbers}."
        return (
            f"{what} against {base}: {numbers} lies {side} 0 when looked at alone, and is not shown: of {comparisons} "
            f"comparisons one may come out so by chance (Holm: p = {found.adjusted:.2f})."
        )
    seen = detectable(found.deviation, found.count)
    return (
        f"{what} against {base}: {numbers}, no difference shown; differences outside {found.low:+.3f} to {found.high:+.3f} are "
        f"unlikely; {found.count} seeds show one of {seen:.3f} four times in five."
    )
