"""All rows of the validation as tables: verdicts, figures, constants with what is assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.experiments import page
from async_rlhf.experiments.planning.validation import areal, deepspeed, fused, hybridflow, more_systems, real, rlhfuse, verl
from async_rlhf.experiments.planning.validation.rows import Figure, Row

ROWS: dict[str, Callable[[], Row]] = {
    "V1": fused.row,
    "V2": hybridflow.resharding,
    "V3": real.seventy_billion,
    "V4": real.weak_scaling,
    "V5": hybridflow.placements,
    "V6": verl.one_step_off,
    "V7": verl.fully_async,
    "V8": verl.modes,
    "V9": verl.thresholds,
    "V10": areal.throughput,
    "V11": areal.end_to_end,
    "V12": more_systems.llamarl,
    "V13": more_systems.mila,
    "V14": deepspeed.openrlhf,
    "V15": deepspeed.epochs,
    "V16": more_systems.nemo,
    "V17": rlhfuse.row,
}
_MOST_LINES = 4  # of single figures of a kind; more are one line


def made(names: Sequence[str] = ()) -> list[Row]:
    """The rows of these names, or all. Raises ConfigError for a name that no row has."""
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"row {name!r}: {did_you_mean(name, ROWS)}")
    return [ROWS[name]() for name in names or ROWS]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Name to Markdown."""
    verdicts = [[row.name, row.system, row.check, row.finding, row.verdict] for row in rows]
    figures = [[row.name, *line] for row in rows for line in _lines(row)]
    constants = [[row.name, row.source, row.fitted or "none", row.assumed or "none"] for row in rows]
    return {
        "summary": summary(rows),
        "verdicts": page.raw_table(["row", "system", "check", "found", "verdict"], verdicts),
        "figures": page.raw_table(["row", "figure", "published", "predicted", "range", "ratio", "how"], figures),
        "constants": page.raw_table(["row", "source", "fitted", "assumed (plausible range): why"], constants),
    }


def summary(rows: Sequence[Row]) -> str:
    """How many rows hold, and how near held-out figures come: of V4, which has most of them, and of the others."""
    text = f"{sum(row.holds for row in rows)} of {len(rows)} rows hold."
    for name, chosen in (("V4", [row for row in rows if row.number == 4]), ("the others", [r for r in rows if r.number != 4])):
        figures = [each for row in chosen for each in row.figures if each.how == "held out" and each.published is not None]
        if figures:
            near = sum(0.5 <= each.ratio <= 2 for each in figures)
            factor = math.exp(median(abs(math.log(each.ratio)) for each in figures))
            text += f" Of {len(figures)} held-out figures of {name}, {near} lie within 2 times"
            text += f"; half of them within {factor:.2f} times."
    return text


def _lines(row: Row) -> Iterable[list[str]]:
    for _, found in groupby(row.figures, key=lambda each: (each.group, each.how, each.published is None)):
        figures = list(found)
        if len(figures) > _MOST_LINES:
            yield _line(f"{figures[0].group} ({len(figures)})", figures)
        else:
            yield from (_line(", ".join(filter(None, (each.group, each.label))), [each]) for each in figures)


def _line(label: str, figures: Sequence[Figure]) -> list[str]:
    """One figure, or several of a kind."""
    first = figures[0]
    unit = f" {first.unit}" if first.unit else ""
    given = first.claim if first.published is None else _range([each.published or 0.0 for each in figures]) + unit
    ratios = [each.ratio for each in figures if each.published is not None]
    ratio = _number(median(ratios)) + (f" ({_range(ratios)})" if len(ratios) > 1 else "") if ratios else ""
    span = _range([edge for each in figures for edge in each.span]) + unit if first.span else ""
    return [label, given, _range([each.predicted for each in figures]) + unit, span, ratio, first.how]


def _range(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def as_data(row: Row) -> dict[str, Any]:
    """For JSON: every figure, none of them summed up."""
    figures = [
        {**vars(figure), "ratio": figure.ratio if figure.published is not None else None, "span": list(figure.span)}
        for figure in row.figures
    ]
    return {**vars(row), "name": row.name, "verdict": row.verdict, "figures": figures}
