"""Twelve configurations of one tiny model that were run on two cores, beside what a simulation predicts of them.

Six of them, `fit`, give the constants: those of the stages alone on that machine (`measured.toml`), times a factor for each
kind of stage. Of the other six only this is known: their settings, the lengths of completions in runs with the same limit, how
long their reward takes alone, and the cores that their strategy gives to each part. Which are which was written down before any
was run. `measured_runs.csv` has three runs of each; its columns are in `README.md`.
"""

from __future__ import annotations

import csv
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from async_rlhf.experiments import page
from async_rlhf.experiments.planning.simulation.refitting import Observed, Refitted, refit, slowed
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Pool, Workload

_HERE = Path(__file__).parent
_QUANTILES = {"length_p50": 0.5, "length_p90": 0.9, "length_p99": 0.99, "length_max": 1.0}
_LENGTHS = 400  # that stand for a distribution
_STEPS = 60
_WAIT_S = 0.5  # of a slow reward, which takes none of this machine's time
_COMPLETION_S = 2e-4
"""About what an actor does for a completion besides (its text, its way to a worker process and back, its record); fitted with
the others, for it was not measured alone."""
_LOADS = {
    "words": (12, 100),
    "long tails": (128, 100),
    "heavy scoring": (12, 10_000),
    "slow rewards": (12, None),
    "long tails, slow rewards": (128, None),
}
"""The most tokens of a completion; rounds of SHA-256 for a score, in the place of a frozen model, where it does not wait."""
_POOLS: Mapping[str, tuple[Pool, ...]] = {
    "": (Pool(2, ("actor", "scoring", "learner")),),
    # With a strategy engine and learner have as many threads as cores, by which those of the tiny model gain nothing.
    "flattening": (Pool(2, ("actor", "scoring", "learner"), (2, 1, 2)),),
    "interleaving": (Pool(1, ("actor",)), Pool(1, ("scoring", "learner"))),
    "separation": (Pool(1, ("actor", "scoring")), Pool(1, ("learner",))),
}
"""By strategy: cores of the two; without one the processes are where the system puts them."""


@cache
def kept() -> dict[str, Any]:
    """`measured.toml`."""
    return tomllib.loads((_HERE / "measured.toml").read_text())


@dataclass(frozen=True)
class Cell:
    """One configuration, and its runs as rows of the file."""

    name: str
    runs: tuple[Mapping[str, str], ...]

    def __getitem__(self, column: str) -> str:
        """Of its settings."""
        return self.runs[0][column]

    def values(self, column: str) -> list[float]:
        return [float(run[column]) for run in self.runs]


@cache
def cells() -> tuple[Cell, ...]:
    with (_HERE / "measured_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(Cell(name, tuple(row for row in rows if row["cell"] == name)) for name in kept()["predicted"])


def _workload(cell: Cell) -> Workload:
    """64 completions a step in groups of 8, 128 slots."""
    longest, rounds = _LOADS[cell["load"]]
    alike = [each for each in cells() if each["use"] == "fit" and _LOADS[each["load"]][0] == longest]

    def median(column: str) -> float:
        return statistics.median(value for each in alike for value in each.values(column))

    known = [0.0, *_QUANTILES.values()], [1.0, *map(median, _QUANTILES)]
    lengths = np.interp((np.arange(_LENGTHS) + 0.5) / _LENGTHS, *known).tolist()
    return Workload(
        groups_per_batch=8,
        group_size=8,
        lengths=[max(1, round(each)) for each in lengths],
        prompt_tokens=round(median("prompt_characters")),
        max_staleness=int(cell["max_staleness"]),
        actors=int(cell["actors"]),
        slots=128,
        queued_groups=0,
        reward_s=(_WAIT_S if rounds is None else kept()["rewards_s"][str(rounds)],),
        reward_cores=rounds is not None,
        judges=1024 if rounds is None else 1,
        shared_judges=cell["strategy"] != "",
        pools=_POOLS[cell["strategy"]],
    )


def predict() -> tuple[Refitted, dict[str, float]]:
    """Constants, and samples a second by cell. Speeds of held-out cells are not looked at."""
    workloads = {cell.name: _workload(cell) for cell in cells()}
    seen = [
        Observed(workloads[cell.name], *(statistics.median(cell.values(name)) for name in ("samples_per_s", "idle_learner")))
        for cell in cells()
        if cell["use"] == "fit"
    ]
    alone: dict[str, Any] = kept()["calibrated"]
    terms: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in alone.items()}
    found = refit(Costs(**terms, completion_s=_COMPLETION_S), seen, steps=_STEPS)
    simulated = {name: simulate(slowed(each, found.factors), found.costs, steps=_STEPS) for name, each in workloads.items()}
    return found, {name: run.samples_per_s for name, run in simulated.items()}


def table(predicted: Mapping[str, float]) -> str:
    """Markdown: predictions beside the runs. Spread: from the slowest to the fastest run, as a share of their median."""
    settings = ("load", "strategy", "max_staleness", "actors", "use")
    lines: list[Sequence[str]] = []
    for cell in cells():
        speeds, speed = cell.values("samples_per_s"), predicted[cell.name]
        median, low, high = statistics.median(speeds), min(speeds), max(speeds)
        spread, error = (high - low) / median, speed / median - 1.0
        measured = [f"{median:.0f} ({low:.0f} to {high:.0f})", f"{spread:.0%}", f"{speed:.0f}", f"{100 * error:+.1f} %"]
        lines.append([cell.name, *(cell[name] for name in settings), *measured, "yes" if abs(error) <= spread else "no"])
    columns = ["cell", *settings[:-1], "for", "measured (lowest to highest), samples/s", "spread", "predicted", "error"]
    return page.raw_table([*columns, "within the spread"], lines)
