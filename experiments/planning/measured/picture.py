"""Predicted beside measured speeds of the cells, and the error of each beside the spread of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments.planning.measured.results import Speed, judged
from async_rlhf.inspect.plot import COLOURS

_USES = {"fit": "fitted on", "held out": "held out"}


def write(path: Path, measured: Sequence[Speed], predicted: Mapping[str, float]) -> None:
    """PNG. Lines through points go from the lowest to the highest run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    speeds, errors = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_speeds(speeds, measured, predicted)
    _draw_errors(errors, measured, predicted)
    figure.savefig(path, dpi=130)


def _draw_speeds(axes: Any, measured: Sequence[Speed], predicted: Mapping[str, float]) -> None:
    values = [value for each in measured for value in (each.low, each.high, predicted[each.cell])]
    edges = [min(values) / 1.15, max(values) * 1.15]
    axes.plot(edges, edges, color="0.6", linewidth=1)
    for number, (use, label) in enumerate(_USES.items()):
        own = [each for each in measured if each.use == use]
        middle = [each.median for each in own]
        axes.errorbar(
            middle,
            [predicted[each.cell] for each in own],
            xerr=[[each.median - each.low for each in own], [each.high - each.median for each in own]],
            fmt="so"[number],
            color=COLOURS[number],
            markerfacecolor="white" if use == "fit" else COLOURS[number],
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges, xlabel="measured, samples/s", ylabel="predicted, samples/s")
    ticks = [tick for tick in (20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000) if edges[0] <= tick <= edges[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_title("Speed of twelve configurations", loc="left", fontsize=10)
    axes.legend(frameon=False)


def _draw_errors(axes: Any, measured: Sequence[Speed], predicted: Mapping[str, float]) -> None:
    """0: the median of a cell's runs."""
    found = judged(measured, predicted).errors
    axes.use_sticky_edges = False  # bars would end at the edge
    for row, each in enumerate(measured):
        number = list(_USES).index(each.use)
        axes.barh(
            row, 100 * each.spread, left=100 * (each.low / each.median - 1), color="0.85", height=0.7,
            label=None if row else "runs, lowest to highest",
        )  # fmt: skip
        axes.plot(
            100 * found[each.cell], row, "so"[number], color=COLOURS[number],
            markerfacecolor="white" if each.use == "fit" else COLOURS[number],
        )  # fmt: skip
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(measured)), [each.cell for each in measured], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("predicted less measured, per cent of the median run")
    axes.set_title("Error beside the spread of the runs", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0))
