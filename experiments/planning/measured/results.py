"""The table of measurements: a CSV file that grows by a row for each run, and what it says of a cell and of a pair of cells."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.measured.cells import CELLS, Cell
from async_rlhf.experiments.throughput.harness import QUIET

Row = dict[str, str]
KEYS = ("cell", "repeat", "use", "load", "strategy", "max_staleness", "actors")
"""The first columns; the facts follow."""


def row_of(cell: Cell, repeat: int, facts: Mapping[str, float | None]) -> Row:
    """facts: None and nan are written as nothing."""
    about = (cell.name, repeat, cell.use, cell.load, cell.strategy or "", cell.max_staleness, cell.actors)
    known = {name: "" if value is None or math.isnan(value) else f"{value:.6g}" for name, value in facts.items()}
    return {**dict(zip(KEYS, map(str, about), strict=True)), **known}


def read(path: Path) -> list[Row]:
    """Nothing where there is no file. Raises ConfigError for a table of something else."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ())[: len(KEYS)] != KEYS:
            raise ConfigError(f"{path} is no table of measurements: its columns do not begin with {', '.join(KEYS)}")
        return list(reader)


def read_predictions(path: Path) -> dict[str, float]:
    """Samples a second by cell. Raises ConfigError."""
    try:
        with path.open(newline="") as file:
            return {row["cell"]: float(row["samples_per_s"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: no CSV with the columns cell and samples_per_s: {error}") from error


def append(path: Path, row: Row) -> None:
    """Write the table again with this row. Raises ConfigError as `read`, and where it was written with other columns."""
    rows = [*read(path), row]
    if rows[0].keys() != row.keys():
        raise ConfigError(f"{path} has other columns than a measurement of this version; give another file with --results")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def missing(rows: Sequence[Row], repeats: int, only: Sequence[str] = ()) -> list[tuple[Cell, int]]:
    """Runs that are not in the table, a repeat of all cells after the other and every other one backward: what drifts with time
    drifts for all alike. Raises ConfigError for a name that is no cell."""
    names = [each.name for each in CELLS]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"{unknown[0]!r} is no cell; there are {', '.join(names)}")
    chosen = [each for each in CELLS if not only or each.name in only]
    done = {(row["cell"], row["repeat"]) for row in rows}
    order = [(each, turn) for turn in range(repeats) for each in (chosen if turn % 2 == 0 else reversed(chosen))]
    return [(each, turn) for each, turn in order if (each.name, str(turn)) not in done]


@dataclass(frozen=True)
class Speed:
    """Samples a second of a cell: median, lowest and highest of its runs. foreign: the largest share of the machine that other
    programs used during one."""

    cell: str
    use: str
    median: float
    low: float
    high: float
    runs: int
    foreign: float

    @property
    def spread(self) -> float:
        """From lowest to highest, as a share of the median."""
        return (self.high - self.low) / self.median

    @property
    def note(self) -> str:
        return f"not quiet: other programs used {self.foreign:.0%}" if self.foreign > QUIET else ""


def speeds(rows: Sequence[Row]) -> list[Speed]:
    """Of the cells that were measured, in their order."""
    found = []
    for each in CELLS:
        own = [row for row in rows if row["cell"] == each.name]
        if own:
            values = [float(row["samples_per_s"]) for row in own]
            foreign = max(float(row["foreign"] or 0.0) for row in own)
            found.append(Speed(each.name, each.use, statistics.median(values), min(values), max(values), len(own), foreign))
    return found


@dataclass(frozen=True)
class Judged:
    """errors: predicted over measured, less 1, by cell. pairs: of cells whose ranges do not touch, how many there are and how
    many of them are predicted in the measured order."""

    errors: Mapping[str, float]
    pairs: int
    right: int


def judged(measured: Sequence[Speed], predicted: Mapping[str, float]) -> Judged:
    """predicted: samples a second by cell; only cells that are in both count."""
    both = [each for each in measured if each.cell in predicted]
    errors = {each.cell: predicted[each.cell] / each.median - 1.0 for each in both}
    right, pairs = ordered(both, predicted)
    return Judged(errors, pairs, right)


def ordered(measured: Sequence[Speed], predicted: Mapping[str, float]) -> tuple[int, int]:
    """Of the pairs whose ranges do not touch, how many are predicted in the measured order, and how many there are."""
    apart = [(a, b) for a, b in combinations(sorted(measured, key=lambda each: each.median), 2) if a.high < b.low]
    return sum(predicted[a.cell] < predicted[b.cell] for a, b in apart), len(apart)


def table(measured: Sequence[Speed], predicted: Mapping[str, float]) -> list[str]:
    """A line a cell, for a person; with predictions, those beside the measurements and how they are ordered."""
    judgement = judged(measured, predicted)
    lines = [f"{'cell':24} {'use':8} {'samples/s':>10} {'spread':>7} {'runs':>4}" + "  predicted   error" * bool(predicted)]
    for each in measured:
        line = f"{each.cell:24} {each.use:8} {each.median:10.1f} {each.spread:7.1%} {each.runs:4}"
        if predicted:
            known = each.cell in predicted
            line += f" {predicted[each.cell]:10.1f} {judgement.errors[each.cell]:+7.1%}" if known else f" {'':10} {'':7}"
        lines.append(f"{line}  {each.note}".rstrip())
    if predicted:
        lines.append(f"{judgement.right} of {judgement.pairs} pairs whose runs do not overlap are in the predicted order")
    return lines
