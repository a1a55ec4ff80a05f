"""One picture a question: its quantities over what is varied, and every comparison with its interval.

Arms differ in colour, marker and dashes at once (the colours are those of Okabe and Ito), so that they are told apart in
print and by readers who see no colours. Needs matplotlib (the extra `experiments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from async_rlhf.experiments.statistics import paired
from async_rlhf.experiments.tabular.findings import Finding, findings, place
from async_rlhf.experiments.tabular.questions import Cell, Question, Row, values
from async_rlhf.experiments.tabular.report import command

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
# Points of one x stand side by side, so that their intervals are seen.
_SHIFT = 0.06


def draw(question: Question, rows: Sequence[Row], directory: Path) -> None:
    """`NAME.png` and `NAME.svg` in the directory; the same bytes for the same rows."""
    figure = _picture(question, rows)
    figure.savefig(directory / f"{question.name}.png", dpi=110)
    # text stays text, and no date or random name makes two equal pictures differ
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": question.name}):
        figure.savefig(directory / f"{question.name}.svg", metadata={"Date": None})


def _picture(question: Question, rows: Sequence[Row]) -> Figure:
    found = findings(question, rows)
    panels = len(question.shown)
    below = 1.0 + 0.21 * len(found)
    figure = Figure(figsize=(max(9.0, 4.6 * panels), 4.9 + below), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[4.2, below])
    above, under = halves
    drawn = above.subplots(1, panels, squeeze=False)[0]
    for axes, (quantity, words) in zip(drawn, question.shown.items(), strict=True):
        _draw_quantity(axes, question, rows, quantity)
        axes.set_title(fill(words, 44), fontsize="medium")
    above.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    _draw_comparisons(under.subplots(), question, found)
    seeds = len({row["seed"] for row in rows})
    made = f"{seeds} paired seeds, {question.samples}; bars: 95 % t intervals"
    figure.suptitle(f"{question.title}\n{made}\n{command(question, rows)}", fontsize="medium")
    return figure


def _draw_quantity(axes: Any, question: Question, rows: Sequence[Row], quantity: str) -> None:
    """The mean over seeds and its interval, at evenly spaced places."""
    arms, xs = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arm", "x"))
    for i, arm in enumerate(arms):
        here = [paired(each, [0.0] * len(each)) for x in xs for each in [values(rows, Cell(quantity, str(arm), x))]]
        means = [each.mean for each in here]
        errors = [[each.mean - each.low for each in here], [each.high - each.mean for each in here]]
        places = [p + _SHIFT * (i - (len(arms) - 1) / 2) for p in range(len(xs))]
        style: dict[str, Any] = {"color": _COLOURS[i], "marker": _MARKERS[i], "linestyle": _DASHES[i]}
        axes.errorbar(places, means, yerr=errors, label=arm, markersize=5, capsize=2, linewidth=1.3, elinewidth=0.9, **style)
    axes.set_xticks(range(len(xs)), [fill(x, 8) if isinstance(x, str) else f"{x:g}" for x in xs])
    axes.set_xlabel(question.x)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _draw_comparisons(axes: Any, question: Question, found: Sequence[Finding]) -> None:
    """A row a comparison: full where it stands after Holm, hollow where not."""
    for row, each in enumerate(found):
        low, high = each.found.mean - each.found.low, each.found.high - each.found.mean
        axes.errorbar(
            each.found.mean,
            row,
            xerr=[[max(0.0, low)], [max(0.0, high)]],
            marker="o",
            color="#000000",
            markerfacecolor="#000000" if each.shown else "#ffffff",
            markersize=5,
            capsize=2,
            elinewidth=1.0,
        )
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(found)), [_compared(question, each) for each in found], fontsize="small")
    axes.set_ylim(len(found) - 0.4, -0.6)
    also = "".join(f"\n{quantity}: {words}" for quantity, words in question.also.items())
    axes.set_xlabel(f"paired difference\nfull: stands after Holm over all {len(found)}, hollow: does not{also}")
    axes.grid(axis="x", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _compared(question: Question, each: Finding) -> str:
    cell, base = each.cell, each.base
    if (cell.arm, cell.x) == (base.arm, base.x):
        return f"{cell.quantity} - {base.quantity}: {cell.arm}, {place(question, cell.x)}"
    if cell.arm == base.arm:
        return f"{cell.quantity}: {cell.arm}, {place(question, cell.x)} - {place(question, base.x)}"
    return f"{cell.quantity}: {cell.arm} - {base.arm}, {place(question, cell.x)}"
