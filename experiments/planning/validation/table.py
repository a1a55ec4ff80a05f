"""All rows, and the tables that `docs/planning.md` shows of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.experiments import page
from async_rlhf.experiments.planning.validation import (
    areal,
    fused,
    hybridflow,
    llamarl,
    mila,
    nemo,
    openrlhf_deepspeed,
    real,
    rlhfuse,
    verl,
)
from async_rlhf.experiments.planning.validation.rows import Figures, Row

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
    "V12": llamarl.row,
    "V13": mila.row,
    "V14": openrlhf_deepspeed.openrlhf,
    "V15": openrlhf_deepspeed.epochs,
    "V16": nemo.row,
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
    for figures in row.groups():
        if len(figures.each) <= _MOST_LINES:
            yield from (_line(Figures((figure,))) for figure in figures.each)
        else:
            yield _line(figures)


def _line(figures: Figures) -> list[str]:
    each = figures.each
    unit = f" {figures.unit}" if figures.unit else ""
    published = each[0].claim if each[0].published is None else _range([f.published or 0.0 for f in each]) + unit
    ratios = [figure.ratio for figure in each if figure.published is not None]
    ratio = _number(figures.ratio) + (f" ({_range(ratios)})" if len(ratios) > 1 else "") if ratios else ""
    span = _range([edge for figure in each for edge in figure.span]) + unit if each[0].span else ""
    return [figures.label, published, _range([f.predicted for f in each]) + unit, span, ratio, figures.how]


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
