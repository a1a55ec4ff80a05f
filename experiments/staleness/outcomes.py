"""The outcomes of each setting: differences of any number within a seed, numbers at equal time and divergence, a target's cost.

Pure. The first setting of a sweep is the reference of `compared`; `contrasts` compares settings that differ in one key. A
number is a series by run. Called by `report` and `plot`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from async_rlhf.experiments.staleness.cells import SCORE
from async_rlhf.experiments.staleness.table import SMOOTHED, Frame, Series, Table
from async_rlhf.experiments.statistics import Mean, adjusted, estimate, first_at, paired

TARGET_SHARE = 0.9
"""Share of the way from the first step's reward to the last quarter's."""


@dataclass(frozen=True)
class Target:
    """A training reward that runs are compared by. start, end: of the reference setting, means over its seeds."""

    value: float
    start: float
    end: float
    reference: str


def target(table: Table) -> Target | None:
    """TARGET_SHARE of what the reference setting learned. None where it learned nothing, or has no rewards."""
    (label, runs), *_ = table.settings.items()
    first = table.steps["reward"].xs(1, level="step")
    start, end = estimate(first[runs]), estimate(table.cells["reward_last_quarter"][runs])
    if start is None or end is None or end.mean - start.mean < 1e-9:  # less is rounding
        return None
    return Target(start.mean + TARGET_SHARE * (end.mean - start.mean), start.mean, end.mean, label)


def reached(table: Table, value: float) -> Frame:
    """By run, its steps and what was spent when the mean reward of SMOOTHED completions first was `value` or above;
    NaN where it never was."""
    means = table.smoothed
    enough = means["samples"].ge(table.cells["trained_samples"].clip(upper=SMOOTHED), level="run")
    first = means[enough & (means["reward"] >= value)].groupby("run").head(1)
    return first.reset_index("step").rename(columns={"step": "steps"}).reindex(table.cells.index)


def compared(table: Table, number: Series) -> dict[str, Mean]:
    """By setting, all but the reference; those that share no measured seed with it are left out."""
    reference, *others = table.settings
    return _differences(table, number, dict.fromkeys(others, reference))


def contrasts(table: Table, axis: str, number: Series) -> dict[str, Mean]:
    """By setting: with the one that has the first value of this axis, in the order of the sweep, and all others equal. p after
    Holm over all of them."""
    settings = {result.label: dict(result.setting) for result in table.results}
    first = table.results[0].setting[table.axes.index(axis)][1]
    found = {}
    for label, setting in settings.items():
        same = next((name for name, other in settings.items() if other == {**setting, axis: first}), label)
        if same != label:
            found[label] = same
    return _differences(table, number, found)


def _differences(table: Table, number: Series, references: Mapping[str, str]) -> dict[str, Mean]:
    """By setting, minus its reference with the same seed (which has the same prompts); p after Holm over all."""
    by_seed = table.cells.assign(number=number, label=table.labels).pivot(index="seed", columns="label", values="number")
    pairs = {label: by_seed[[label, reference]].dropna() for label, reference in references.items()}
    return adjusted({label: paired(*both.to_numpy().T) for label, both in pairs.items() if len(both)})


def at_equal_time(table: Table, axis: str) -> Series:
    """The smoothed training reward when the first of the runs that differ only in this axis had ended."""
    first = _least(table, axis, table.cells["wall_s"])
    done = table.smoothed["reward"][table.steps["seconds"].le(first, level="run")]
    return done.groupby("run").tail(1).droplevel("step")


def at_equal_kl(table: Table, axis: str, name: str) -> Series:
    """The mean of one score along training (of the reward where `name` is empty) where the divergence from the reference first
    is what all of the runs reach that differ only in this axis."""
    paths = path(table, name)
    number = paths["kl"].groupby("run").max().reindex(table.cells.index)
    levels = _least(table, axis, number.fillna(-math.inf))
    for run, points in paths.groupby("run"):
        level = levels[run]
        number[run] = first_at(points["kl"].to_numpy(), points["score"].to_numpy(), level) if math.isfinite(level) else math.nan
    return number


def path(table: Table, name: str) -> Frame:
    """By run and block: `kl`, the divergence from the reference in nats a token, and `score`, of the reward where `name` is
    empty; by the weights that sampled. Blocks in which one was not measured are left out."""
    found = table.blocks.reindex(columns=["kl/reference", SCORE.format(name) if name else "reward"])
    return found.set_axis(["kl", "score"], axis=1).dropna()


def _least(table: Table, axis: str, number: Series) -> Series:
    """The least number, for each run, among those that differ from it only in this axis."""
    # as text, for a swept value may be a list
    others = [table.cells[each].map(str) for each in ("seed", *table.axes) if each != axis]
    return number.groupby(others).transform("min")
