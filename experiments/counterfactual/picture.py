"""The picture of what was measured: each measure of every correction, over steps and over staleness.

Corrections differ in colour, marker and dashes at once (the colours are those of Okabe and Ito, and two more). Needs matplotlib
(the extra `experiments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from async_rlhf.experiments.counterfactual.page import FRESH, Row, alike, command, shortfall
from async_rlhf.experiments.page import save_picture, tidy

_MEASURES = {
    "cosine": "cosine with the reference",
    "norm_ratio": "norm / norm of the reference",
    "share": "share: length along the true gradient\n(1: unbiased)",
}
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D1F", "#7F7F7F", "#332288")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", "h")
_DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 2)), (0, (6, 1, 2, 1)),
)  # fmt: skip


def draw(rows: Sequence[Row], directory: Path) -> None:
    """`picture.png` and `picture.svg`: each measure over steps, and over mean staleness where that is another number; the same
    bytes for the same rows. rows: of `over_seeds`."""
    over = [("step", "learner step"), ("staleness", "mean staleness")]
    if all(row.step == row.staleness for row in rows):
        over = [("step", "learner step and staleness")]
    figure = Figure(figsize=(12.5 if over[1:] else 9, 12), layout="constrained")
    panels: Any = figure.subplots(len(_MEASURES), len(over), sharey="row", squeeze=False)
    for line, measure in enumerate(_MEASURES):
        for axes, (x, words) in zip(panels[line], over, strict=True):
            _panel(axes, rows, measure, x)
            axes.set_xlabel(words)
        panels[line][0].set_ylabel(_MEASURES[measure])
    named, columns = panels[0][0].get_legend_handles_labels(), 2 + len(over)
    figure.legend(*named, loc="outside lower center", ncols=columns, frameon=False)
    first, runs = rows[0], rows[0].runs
    batches, bars = "one stale batch", ""
    if runs > 1:
        batches, bars = f"{runs} stale batches, one a seed,", f"bars: 95 % intervals (over {runs} seeds); "
    title = (
        f"Gradients of {batches} of {first.groups} groups against {first.completions} fresh completions\n"
        f"{bars}grey: nine in ten fresh batches of the same size\n{command(rows)}"
    )
    warning = shortfall(rows[0].completions)
    figure.suptitle(f"{title}\nWARNING: {warning}" if warning else title, fontsize="medium")
    save_picture(figure, directory, "picture", dpi=100)


def _panel(axes: Any, rows: Sequence[Row], measure: str, x: str) -> None:
    fresh = sorted((row for row in rows if row.estimate == FRESH), key=lambda row: float(getattr(row, x)))
    places = [float(getattr(row, x)) for row in fresh]
    width = (max(places) - min(places) or 1.0) / len(places)
    # a band wide enough to be seen where there is one place only
    at = [places[0] - width / 3, *places, places[-1] + width / 3]
    band = [getattr(row, measure) for row in (fresh[0], *fresh, fresh[-1])]
    low, high = [each.low for each in band], [each.high for each in band]
    axes.fill_between(at, low, high, color="0.88", linewidth=0, label="fresh batches")
    axes.plot(at, [each.value for each in band], color="0.55", linewidth=1.2, label="mean of fresh batches")
    if measure == "cosine":
        ceilings = [row.ceiling for row in (fresh[0], *fresh, fresh[-1])]
        axes.plot(at, ceilings, color="#B00000", linewidth=1.6, label="ceiling: the true gradient itself")
    names = _drawn(rows)
    for i, (name, label) in enumerate(names.items()):
        mine = sorted((row for row in rows if row.estimate == name), key=lambda row: float(getattr(row, x)))
        found = [getattr(row, measure) for row in mine]
        shift = 0.4 * width * ((i + 0.5) / len(names) - 0.5)
        errors = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
        # steps of one staleness stand in one place: a line through them would say nothing
        joined = len({getattr(row, x) for row in mine}) == len(mine)
        style = _DASHES[i % len(_DASHES)] if joined else "none"
        axes.errorbar(
            [float(getattr(row, x)) + shift for row in mine], [each.value for each in found], yerr=errors, label=label,
            color=_COLOURS[i % len(_COLOURS)], marker=_MARKERS[i % len(_MARKERS)], linestyle=style, markersize=4.5, capsize=2,
            linewidth=1.0, elinewidth=0.8,
        )  # fmt: skip
    if measure == "norm_ratio":
        axes.set_yscale("log", nonpositive="clip")
    axes.set_xticks(sorted(set(places)), [f"{place:g}" for place in sorted(set(places))])
    axes.axhline(0.0 if measure == "cosine" else 1.0, color="0.5", linewidth=0.8)
    tidy(axes, colour="0.92")


def _drawn(rows: Sequence[Row]) -> dict[str, str]:
    """The corrections that have a line of their own, and its label: those that gave one gradient at every step share it."""
    steps = len({row.step for row in rows})
    together: dict[tuple[str, ...], int] = {}
    for same in alike(rows):
        names = tuple(row.estimate for row in same)
        together[names] = together.get(names, 0) + 1
    joined = {names for names, count in together.items() if count == steps}
    singles = dict.fromkeys(
        row.estimate for row in rows if row.estimate != FRESH and not any(row.estimate in j for j in joined)
    )
    found = {names[0]: ", ".join(names) for names in joined} | {name: name for name in singles}
    return {row.estimate: found[row.estimate] for row in rows if row.estimate in found}
