"""How long completions are: a log-normal that is cut, a histogram, or those of a run; and the lengths of one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field, model_validator

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_files import read_lines

_STEPS_OF_WIDTH = 60


class LengthsConfig(Section):
    """Tokens of prompts and completions. Completions: `mean` and `spread` of a log-normal, a `histogram`, or a run's file."""

    prompt: int = Field(default=512, ge=1)
    """Of each prompt."""
    longest: int = Field(ge=1)
    """Of a completion, where generation is cut: `generation.max_completion_length`."""
    mean: float | None = Field(default=None, ge=1)
    """Of the completions as they are, those that are cut among them; below `longest`."""
    spread: float = Field(default=0.7, ge=0, le=3)
    """Standard deviation of the logarithm of a length before it is cut; 0: all are equally long."""
    histogram: tuple[tuple[int, float], ...] = ()
    """Pairs of a length and its weight."""
    rollouts: str | None = None
    """`rollouts.jsonl` of a run: the lengths of its completions."""

    @model_validator(mode="after")
    def _one_source(self) -> LengthsConfig:
        given = [name for name in ("mean", "histogram", "rollouts") if getattr(self, name)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"{found}; of mean, histogram and rollouts give exactly one")
        if self.mean is not None and self.mean >= self.longest and self.spread:
            raise ValueError(f"mean = {self.mean:g} must be below longest = {self.longest}, where completions are cut")
        for length, weight in self.histogram:
            if not 1 <= length <= self.longest or weight < 0:
                raise ValueError(
                    f"histogram: [{length}, {weight:g}]; lengths are 1 to longest = {self.longest}, weights 0 or more"
                )
        if self.histogram and not sum(weight for _, weight in self.histogram) > 0:
            raise ValueError("histogram: all weights are 0")
        return self

    def batch(self, rows: int) -> tuple[int, ...]:
        """The lengths of `rows` completions, descending: the quantiles (i + 1/2) / rows. Raises ConfigError for a file without
        completions."""
        shares = [(row + 0.5) / rows for row in range(rows)]
        if self.mean is not None:
            found = _log_normal(self.mean, self.spread, self.longest, shares)
        elif self.histogram:
            found = _quantiles(self.histogram, shares)
        else:
            lengths = _lengths_of(Path(self.rollouts or ""))
            found = _quantiles([(min(length, self.longest), 1.0) for length in lengths], shares)
        return tuple(sorted(found, reverse=True))


def _log_normal(mean: float, spread: float, longest: int, shares: Sequence[float]) -> list[int]:
    """The logarithm's mean by bisection, so that the cut lengths have this mean."""

    def cut(log_mean: float) -> list[float]:
        return [min(max(math.exp(log_mean + spread * point), 1.0), longest) for point in points]

    points = [NormalDist().inv_cdf(share) for share in shares]
    low, high = math.log(mean) - 10 * spread - 1, math.log(longest) + 10 * spread + 1
    for _ in range(_STEPS_OF_WIDTH):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * len(points) else (low, middle)
    return [round(length) for length in cut(high)]


def _quantiles(weighted: Iterable[tuple[int, float]], shares: Sequence[float]) -> list[int]:
    """shares: ascending, between 0 and 1."""
    pairs = sorted(weighted)
    sums = list(accumulate(weight for _, weight in pairs))
    found, at = [], 0
    for share in shares:
        while sums[at] < share * sums[-1] and at < len(pairs) - 1:
            at += 1
        found.append(pairs[at][0])
    return found


def _lengths_of(path: Path) -> list[int]:
    found = [length for line in read_lines(path).records for length in _of_group(line)]
    if not found:
        raise ConfigError(f"lengths.rollouts = {str(path)!r}: no completions in it; name the rollouts.jsonl of a run")
    return found


def _of_group(line: dict[str, Any]) -> list[int]:
    rollouts = line.get("rollouts")
    tokens = [each.get("tokens") for each in rollouts if isinstance(each, dict)] if isinstance(rollouts, list) else []
    return [len(each) for each in tokens if isinstance(each, list) and each]
