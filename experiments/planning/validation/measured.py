"""Twelve configurations of one tiny model that were run on two cores, beside what a simulation predicts of them.

Six of them, `fit`, give the constants: those of `async-rlhf calibrate` on that machine (`measured_calibration.json`), times a
factor for each kind of stage. Of the other six only this is known: their settings, the lengths of completions in runs with the
same limit, how long their reward takes alone, and the cores that their strategy gives to each part. Which are which was written
down before any was run. `measured_runs.csv` has three runs of each; its columns are in `README.md`.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from async_rlhf.experiments import page
from async_rlhf.experiments.planning.model.calibration import load
from async_rlhf.experiments.planning.simulation.refitting import Observed, Refitted, refit, slowed
from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Pool, Workload

Use = Literal["fit", "held out"]
Strategy = Literal["flattening", "interleaving", "separation"]
_HERE = Path(__file__).parent
_QUANTILES = {"length_p50": 0.5, "length_p90": 0.9, "length_p99": 0.99, "length_max": 1.0}
_LENGTHS = 400  # that stand for a distribution
_STEPS = 60
_WAIT_S = 0.5  # of a slow reward, which takes none of this machine's time
COMPLETION_S = 2e-4
"""About what an actor does for a completion besides (its text, its way to a worker process and back, its record); fitted with
the others, for `calibrate` does not measure it."""
POOLS: Mapping[Strategy | None, tuple[Pool, ...]] = {
    None: (Pool(2, ("actor", "scoring", "learner")),),
    # With a strategy engine and learner have as many threads as cores, by which those of the tiny model gain nothing.
    "flattening": (Pool(2, ("actor", "scoring", "learner"), (2, 1, 2)),),
    "interleaving": (Pool(1, ("actor",)), Pool(1, ("scoring", "learner"))),
    "separation": (Pool(1, ("actor", "scoring")), Pool(1, ("learner",))),
}


@dataclass(frozen=True)
class Load:
    """rounds: of SHA-256 for a score, in the place of a frozen model; None: the score waits."""

    name: str
    longest: int
    rounds: int | None


_WORDS, _TAILS = Load("words", 12, 100), Load("long tails", 128, 100)
_SCORING, _SLOW = Load("heavy scoring", 12, 10_000), Load("slow rewards", 12, None)
_SLOW_TAILS = Load("long tails, slow rewards", 128, None)


@dataclass(frozen=True)
class Cell:
    """One configuration. strategy: None leaves processes where the system puts them."""

    name: str
    use: Use
    load: Load
    strategy: Strategy | None = None
    max_staleness: int = 1
    actors: int = 1


CELLS = (
    Cell("tails-flattening", "fit", _TAILS, "flattening"),
    Cell("tails-interleaving", "held out", _TAILS, "interleaving"),
    Cell("tails-separation", "fit", _TAILS, "separation"),
    Cell("scoring-flattening", "held out", _SCORING, "flattening"),
    Cell("scoring-interleaving", "fit", _SCORING, "interleaving"),
    Cell("scoring-separation", "held out", _SCORING, "separation"),
    Cell("words-0", "fit", _WORDS, max_staleness=0),
    Cell("tails-1", "held out", _TAILS, max_staleness=1),
    Cell("slow-1", "fit", _SLOW, max_staleness=1),
    Cell("slow-2-two-actors", "held out", _SLOW, max_staleness=2, actors=2),
    Cell("words-4-three-actors", "fit", _WORDS, max_staleness=4, actors=3),
    Cell("tails-slow-8", "held out", _SLOW_TAILS, max_staleness=8),
)


@dataclass(frozen=True)
class Predictions:
    """samples_per_s: by cell."""

    refitted: Refitted
    samples_per_s: Mapping[str, float]


@dataclass(frozen=True)
class Speed:
    """Samples a second of a cell: median, lowest and highest of its runs."""

    cell: Cell
    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """From lowest to highest, as a share of the median."""
        return (self.high - self.low) / self.median


@cache
def _runs() -> Mapping[str, Sequence[Mapping[str, str]]]:
    """By cell."""
    with (_HERE / "measured_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {cell.name: [row for row in rows if row["cell"] == cell.name] for cell in CELLS}


def _values(cells: Sequence[Cell], name: str) -> list[float]:
    return [float(row[name]) for cell in cells for row in _runs()[cell.name]]


def speeds() -> list[Speed]:
    found = [(cell, _values([cell], "samples_per_s")) for cell in CELLS]
    return [Speed(cell, statistics.median(values), min(values), max(values)) for cell, values in found]


def workload(cell: Cell, rewards_s: Mapping[str, float]) -> Workload:
    """64 completions a step in groups of 8, 128 slots. rewards_s: seconds of so many rounds, alone."""
    alike = [each for each in CELLS if each.use == "fit" and each.load.longest == cell.load.longest]
    known = [0.0, *_QUANTILES.values()], [1.0, *(statistics.median(_values(alike, name)) for name in _QUANTILES)]
    lengths = np.interp((np.arange(_LENGTHS) + 0.5) / _LENGTHS, *known).tolist()
    rounds = cell.load.rounds
    return Workload(
        groups_per_batch=8,
        group_size=8,
        lengths=[max(1, round(each)) for each in lengths],
        prompt_tokens=round(statistics.median(_values(alike, "prompt_characters"))),
        max_staleness=cell.max_staleness,
        actors=cell.actors,
        slots=128,
        queued_groups=0,
        reward_s=(_WAIT_S if rounds is None else rewards_s[str(rounds)],),
        reward_cores=rounds is not None,
        judges=1024 if rounds is None else 1,
        shared_judges=cell.strategy is not None,
        pools=POOLS[cell.strategy],
    )


def predict() -> Predictions:
    """Speeds of held-out cells are not looked at."""
    rewards_s = json.loads((_HERE / "measured_constants.json").read_text())["rewards_s"]
    workloads = {cell.name: workload(cell, rewards_s) for cell in CELLS}
    seen = [
        Observed(
            workloads[cell.name], *(statistics.median(_values([cell], name)) for name in ("samples_per_s", "idle_learner"))
        )
        for cell in CELLS
        if cell.use == "fit"
    ]
    costs = load(_HERE / "measured_calibration.json").costs.model_copy(update={"completion_s": COMPLETION_S})
    found = refit(costs, seen, steps=_STEPS)
    simulated = {name: simulate(slowed(each, found.factors), found.costs, steps=_STEPS) for name, each in workloads.items()}
    return Predictions(found, {name: run.samples_per_s for name, run in simulated.items()})


def kept() -> tuple[dict[str, float], dict[str, float]]:
    """Of the files: predicted samples a second by cell, and the factors that were fitted."""
    with (_HERE / "measured_predictions.csv").open(newline="") as file:
        predicted = {row["cell"]: float(row["samples_per_s"]) for row in csv.DictReader(file)}
    return predicted, json.loads((_HERE / "measured_constants.json").read_text())["factors"]


def tables(predicted: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, str]:
    """Name to Markdown: predictions beside the runs, and the factors that were fitted."""
    columns = [
        "cell",
        "load",
        "strategy",
        "max_staleness",
        "actors",
        "for",
        "measured (lowest to highest), samples/s",
        "spread",
    ]
    lines = []
    for each in speeds():
        cell, error = each.cell, predicted[each.cell.name] / each.median - 1.0
        line = [cell.name, cell.load.name, cell.strategy or "", str(cell.max_staleness), str(cell.actors), cell.use]
        line += [f"{each.median:.0f} ({each.low:.0f} to {each.high:.0f})", f"{each.spread:.0%}", f"{predicted[cell.name]:.0f}"]
        lines.append([*line, f"{100 * error:+.1f} %", "yes" if abs(error) <= each.spread else "no"])
    units = ("decoding and prefill", "work for each completion", "a learner step", "weights", "work of a reward")
    scaled = ", ".join(f"{unit} {factor:.2f}" for unit, factor in zip(units, factors.values(), strict=True))
    return {
        "measured": page.raw_table([*columns, "predicted", "error", "within the spread"], lines),
        "measured-factors": f"The fit multiplied the constants of `calibrate` by: {scaled}.",
    }
