"""What came of each setting: differences of final rewards and of areas under curves, what a target cost, how small a difference
shows.

Pure. The first setting of a sweep is the reference of `compared`; `contrasts` compares settings that differ in one key.
Called by `measures` and `trade_offs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rlhf.experiments.staleness.cells import SCORE, CellResult, mean
from async_rlhf.experiments.statistics import (
    Array,
    Mean,
    adjusted,
    estimate,
    first_at,
    paired,
)

TARGET_SHARE = 0.9
"""Of the way from the first step's reward to the last quarter's."""
SMOOTHED = 640
"""Completions over which a reward is averaged before it is held against the target: a small batch says little."""
BLOCK = 256
"""Completions that a point of a path stands for, at least."""

Number = Callable[[CellResult], float | None]


@dataclass(frozen=True)
class Target:
    """A training reward that runs are compared by. start, end: of the reference setting, means over its seeds."""

    value: float
    start: float
    end: float
    reference: str


@dataclass(frozen=True)
class Reached:
    """What it took until the target was reached; tokens None where they were not kept."""

    steps: int
    samples: float
    tokens: float | None
    seconds: float


def by_setting(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Results of each setting, in the order of the sweep."""
    settings: dict[str, list[CellResult]] = {}
    for result in results:
        settings.setdefault(result.label, []).append(result)
    return settings


def scores_apart(results: Sequence[CellResult]) -> list[str]:
    """Reward functions to be looked at on their own: where several tell runs apart, also those that are not rewarded."""
    found = {name for result in results for name in result.scores}
    apart = [name for name in sorted(found) if len({result.held_out_end.scores.get(name) for result in results}) > 1]
    return apart if len(apart) > 1 else []


def final_reward(result: CellResult) -> float | None:
    """On the held-out prompts."""
    return result.held_out_end.reward


def paired_difference(
    results: Sequence[CellResult],
    reference: Sequence[CellResult],
    number: Number = final_reward,
) -> Mean | None:
    """A number of a setting minus that of the reference setting with the same seed (which has the same prompts)."""
    base = {result.seed: number(result) for result in reference}
    both = [(number(result), base.get(result.seed)) for result in results]
    pairs = [(mine, other) for mine, other in both if mine is not None and other is not None]
    return paired(*zip(*pairs, strict=True)) if pairs else None


def area(result: CellResult) -> float | None:
    """Under the training reward, as a mean height."""
    return result.reward_area


def target(results: Sequence[CellResult]) -> Target | None:
    """TARGET_SHARE of what the reference setting learned. None where it learned nothing, or has no rewards."""
    (label, cells), *_ = by_setting(results).items()
    start, end = estimate(smoothed(cell)[0] for cell in cells), estimate(cell.reward_last_quarter for cell in cells)
    if start is None or end is None or end.mean <= start.mean:
        return None
    return Target(start.mean + TARGET_SHARE * (end.mean - start.mean), start.mean, end.mean, label)


def smoothed(result: CellResult, name: str = "") -> list[float | None]:
    """Of each step the mean of it and those before it, SMOOTHED completions together; at the start what there is. name: of a
    curve; the reward's is empty."""
    together, values = _together(result, SMOOTHED), result.curves.get(name, ()) if name else result.rewards
    return [mean(values[max(0, step - together) : step]) for step in range(1, len(values) + 1)]


def _together(result: CellResult, completions: int) -> int:
    """Steps that have so many completions."""
    return max(1, -(-completions * result.steps // result.trained_samples))


def reached(result: CellResult, value: float) -> Reached | None:
    """When the mean reward of SMOOTHED completions was `value` or above for the first time; None where it never was."""
    fewest = min(_together(result, SMOOTHED), result.steps)
    for i, reward in enumerate(smoothed(result)):
        if i + 1 >= fewest and reward is not None and reward >= value:
            tokens = result.tokens
            return Reached(i + 1, result.samples[i], None if tokens is None else tokens[i], result.seconds[i])
    return None


def compared(results: Sequence[CellResult], number: Number = final_reward) -> dict[str, Mean]:
    """By setting, all but the reference; those that share no measured seed with it are left out."""
    (_, reference), *others = by_setting(results).items()
    found = {label: paired_difference(cells, reference, number) for label, cells in others}
    return adjusted({label: each for label, each in found.items() if each is not None})


def contrasts(results: Sequence[CellResult], axis: str, number: Number = final_reward) -> dict[str, Mean]:
    """By setting: with the one that has the first value of this axis, in the order of the sweep, and all others equal. p after
    Holm over all of them."""
    groups = {cells[0].setting: cells for cells in by_setting(results).values()}
    first = dict(next(iter(groups)))[axis]
    found: dict[str, Mean] = {}
    for setting, cells in groups.items():
        reference = groups.get(tuple((key, first if key == axis else value) for key, value in setting))
        if reference is None or dict(setting)[axis] == first:
            continue
        if (each := paired_difference(cells, reference, number)) is not None:
            found[cells[0].label] = each
    return adjusted(found)


def log_seconds(result: CellResult) -> float:
    """Natural logarithm of the sum of the steps' times, whose differences are ratios of times."""
    return math.log(result.wall_s)


def at_equal_time(results: Sequence[CellResult], axis: str) -> Number:
    """The smoothed training reward when the first of the runs that differ only in this axis had ended."""
    first = _least(results, axis, lambda result: result.wall_s)

    def number(result: CellResult) -> float | None:
        done = sum(second <= first[_group(result, axis)] for second in result.seconds)
        return smoothed(result)[done - 1] if done else None

    return number


def at_equal_kl(results: Sequence[CellResult], axis: str, name: str) -> Number:
    """One score along training where the divergence from the reference first is what all of the runs reach that differ only in
    this axis."""

    def points(result: CellResult) -> tuple[Array, Array]:
        known = path(result, name)
        return np.array([kl for kl, _ in known]), np.array([score for _, score in known])

    reached_by_all = _least(results, axis, lambda result: float(points(result)[0].max(initial=-math.inf)))

    def number(result: CellResult) -> float | None:
        kls, scores = points(result)
        level = reached_by_all[_group(result, axis)]
        return first_at(kls, scores, level) if math.isfinite(level) else None

    return number


def _least(results: Sequence[CellResult], axis: str, number: Callable[[CellResult], float]) -> dict[Any, float]:
    """Among the runs of each group."""
    found: dict[Any, float] = {}
    for result in results:
        found[_group(result, axis)] = min(found.get(_group(result, axis), math.inf), number(result))
    return found


def _group(result: CellResult, axis: str) -> Any:
    """The same for runs that differ only in this axis."""
    return result.seed, tuple(pair for pair in result.setting if pair[0] != axis)


def path(cell: CellResult, name: str) -> list[tuple[float, float]]:
    """Along training, by the weights that sampled: divergence from the reference in nats a token, and one score, of the reward
    where `name` is empty; means of steps together until they have BLOCK completions, where both were measured."""
    scores = cell.curves.get(SCORE.format(name), ()) if name else cell.rewards
    kls = cell.curves.get("kl/reference", ())
    together = _together(cell, BLOCK)
    ends = range(together, min(len(scores), len(kls)) + 1, together)
    found = ((mean(kls[end - together : end]), mean(scores[end - together : end])) for end in ends)
    return [(kl, score) for kl, score in found if kl is not None and score is not None]
