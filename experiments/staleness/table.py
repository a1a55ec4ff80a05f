"""The table of a sweep, or of one run: a row a cell, and beside it a row a step. All pages, pictures and checks read it.

Computes from what is kept, reads no file. The one module that imports pandas (the extra `experiments`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness.cells import CellResult

try:
    import pandas
except ModuleNotFoundError as error:
    raise ConfigError("sweeps and reports need pandas: pip install 'async-rlhf[experiments]'") from error

Frame: TypeAlias = pandas.DataFrame
Series: TypeAlias = pandas.Series

SMOOTHED = 640
"""Completions over which a curve is averaged before it is drawn or held against a target: a small batch says little."""
BLOCK = 256
"""Completions that a point of a path stands for, at least."""
SPENT = ("samples", "tokens", "seconds")
"""The cost of training until the end of a step: completions and tokens trained on, seconds since the start."""


@dataclass(frozen=True)
class Table:
    """The measurements of a sweep's cells. Frames are indexed by `run`, the place of a cell in results, which has at least one;
    a number that was not measured, or not kept, is NaN."""

    results: Sequence[CellResult]

    @cached_property
    def cells(self) -> Frame:
        """A row a run: the columns of results.csv, which docs/sweeps.md explains."""
        rows = [_row(result, self.steps.loc[run]) for run, result in enumerate(self.results)]
        found = pandas.DataFrame(rows, index=pandas.RangeIndex(len(rows), name="run"))
        # swept values stay as they were written, whole numbers beside missing ones whole, and None is a number that is missing
        kinds: dict[str, Any] = {name: "float64" for name in found if found[name].isna().all()}
        for axis in self.axes:
            found[axis] = pandas.Series([row[axis] for row in rows], found.index, dtype=object)
        return found.astype({**kinds, "generated_tokens": "Int64"})

    @cached_property
    def steps(self) -> Frame:
        """A row a step, by `run` and `step`: SPENT; `reward`; and the metrics of docs/metrics.md that were kept, but
        `samples` and `tokens` for what a batch has."""
        return pandas.concat({run: _steps(result) for run, result in enumerate(self.results)}, names=["run"])

    @cached_property
    def curves(self) -> Frame:
        """The steps, each with its cell, setting and seed: for a notebook."""
        return self.cells[["cell", *self.axes, "seed"]].join(self.steps).reset_index("step")

    @cached_property
    def smoothed(self) -> Frame:
        """As `steps`, each number the mean of its step and those before it, SMOOTHED completions together, at the start of what
        there is; but not what was spent."""
        means = [own.rolling(self._together(run, SMOOTHED), min_periods=1).mean() for run, own in self.steps.groupby("run")]
        return pandas.concat(means).assign(**self.steps[list(SPENT)])

    @cached_property
    def blocks(self) -> Frame:
        """By `run` and block: means of as many steps as have BLOCK completions; a rest is left out."""
        return pandas.concat({run: self._blocks(run, own) for run, own in self.steps.groupby("run")}, names=["run"])

    def _blocks(self, run: int, steps: Frame) -> Frame:
        together = self._together(run, BLOCK)
        return steps.groupby(np.arange(len(steps)) // together).mean()[: len(steps) // together]

    def _together(self, run: int, completions: int) -> int:
        """Steps that have so many completions."""
        cell = self.cells.loc[run]
        return max(1, int(-(-completions * cell["steps"] // cell["trained_samples"])))

    @cached_property
    def ledger(self) -> Frame:
        """By run, attempts and tokens in the words of the queue's ledger."""
        return pandas.DataFrame([dict(result.ledger) for result in self.results]).rename_axis("run")

    @cached_property
    def ages(self) -> Frame:
        """By run and age in steps, trained tokens of that age."""
        return pandas.DataFrame([dict(result.staleness_tokens) for result in self.results]).rename_axis("run").fillna(0)

    @property
    def axes(self) -> list[str]:
        """The swept keys."""
        return [axis for axis, _ in self.results[0].setting]

    @cached_property
    def labels(self) -> Series:
        """By run, its setting in words."""
        return pandas.Series([result.label for result in self.results]).rename_axis("run")

    @cached_property
    def settings(self) -> dict[str, list[int]]:
        """The runs of each setting, in the order of the sweep. The first is what others are compared with."""
        return {label: runs.index.to_list() for label, runs in self.labels.groupby(self.labels, sort=False)}

    @property
    def seeds(self) -> list[int]:
        """How many each setting has."""
        return [len(runs) for runs in self.settings.values()]

    @cached_property
    def scores(self) -> list[str]:
        """Reward functions to be looked at on their own: where several tell runs apart, also those that are not rewarded."""
        names = sorted({name for result in self.results for name in result.scores})
        apart = [name for name in names if self.cells[f"held_out_{name}_end"].nunique(dropna=False) > 1]
        return apart if len(apart) > 1 else []

    def mean_of(self, name: str) -> Series:
        """By run, over its steps; NaN where it was not kept."""
        return self.steps.reindex(columns=[name])[name].groupby("run").mean()


def _steps(result: CellResult) -> Frame:
    numbers = {"seconds": result.seconds, "reward": result.rewards, **result.curves}
    places = pandas.RangeIndex(1, len(result.rewards) + 1, name="step")
    found = pandas.DataFrame(numbers, places, dtype="float64").rename(columns={"num_tokens": "tokens"})
    return found.assign(samples=found["samples"].cumsum(), tokens=found["tokens"].cumsum())


def _row(result: CellResult, steps: Frame) -> dict[str, Any]:
    ages, tokens = np.array(result.staleness_tokens).T
    start, end = result.held_out_start, result.held_out_end
    known, seconds = steps["reward"].dropna(), steps["seconds"]
    spans = len(known) > 1
    last = steps[-math.ceil(len(steps) / 4) :].mean()
    later_s = seconds.iloc[-1] - seconds.iloc[0]
    return {
        "cell": result.cell,
        **dict(result.setting),
        "seed": result.seed,
        "steps": len(steps),
        "trained_samples": int(steps["samples"].iloc[-1]),
        "held_out_reward_start": start.reward,
        "held_out_reward_end": end.reward,
        "held_out_accuracy_start": start.accuracy,
        "held_out_accuracy_end": end.accuracy,
        "held_out_length_end": end.length,
        **{f"held_out_{name}_end": end.scores.get(name) for name in result.scores},
        "reward_last_quarter": last["reward"],
        # bridged where a step has no reward
        "reward_area": np.trapezoid(known, known.index) / (known.index[-1] - known.index[0]) if spans else known.mean(),
        "staleness_mean": ages @ tokens / tokens.sum(),
        "staleness_max": result.staleness_max,
        "staleness_violations": result.staleness_violations,
        "is_ess_mean": result.is_ess_mean,
        "is_ratio_max": result.is_ratio_max,
        "kl_behaviour_mean": result.kl_behaviour_mean,
        "clip_ratio_mean": steps.get("clip_ratio/region_mean", pandas.Series(dtype="float64")).mean(),
        "kl_reference_end": last.get("kl/reference"),
        "generated_tokens": result.ledger.get("tokens_put"),
        "trained_tokens": tokens.sum(),
        "wall_s": seconds.iloc[-1],
        "samples_per_s": (steps["samples"].iloc[-1] - steps["samples"].iloc[0]) / later_s if later_s else math.nan,
    }
