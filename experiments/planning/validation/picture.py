"""Published against predicted figures, each a point; on the diagonal they agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments.planning.validation.rows import Figure, Row

_BANDS = (("seconds, hours", {"s", "h"}), ("rates and sizes", {"PFLOP/s", "k tokens/s", "GB"}), ("gains", {""}))


def write(path: Path, rows: Sequence[Row]) -> None:
    """A panel for each kind of unit: hollow points were fitted, lines are the range of what is assumed."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(13, 5), layout="constrained")
    for number, (title, units) in enumerate(_BANDS):
        axes = canvas.add_subplot(1, len(_BANDS), number + 1)
        shown = [(row, [each for each in row.figures if _is_point(each) and each.unit in units]) for row in rows]
        values = [value for _, figures in shown for each in figures for value in (each.published or 0.0, each.predicted)]
        if not values:
            continue
        edges = [min(values) / 1.3, max(values) * 1.3]
        axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges, title=title, xlabel="published", ylabel="predicted")
        axes.plot(edges, edges, color="0.4", linewidth=1)
        axes.fill_between(
            edges, [edge / 2 for edge in edges], [edge * 2 for edge in edges], color="0.93", label="within 2 times"
        )
        for place, (row, figures) in enumerate(shown):
            color = f"C{place % 10}"
            for each in figures:
                if each.span:
                    axes.vlines(each.published or 0.0, min(each.span), max(each.span), color=color, linewidth=0.8, alpha=0.5)
            for how, fill in (("held out", color), ("fitted", "white")):
                points = [each for each in figures if each.how == how]
                axes.scatter(
                    [each.published or 0.0 for each in points],
                    [each.predicted for each in points],
                    s=22,
                    marker="os^D"[place // 10 * 2 + place % 2],
                    edgecolors=color,
                    facecolors=fill,
                    linewidths=0.9,
                    label=row.name if how == "held out" and points else None,
                    zorder=3,
                )
        _name_decades(axes, edges)
        axes.scatter([], [], s=22, edgecolors="0.3", facecolors="white", linewidths=0.9, label="fitted (hollow)")
        axes.legend(fontsize=7, ncols=2, loc="upper left")
    canvas.savefig(path, dpi=110)


def _name_decades(axes: Any, edges: Sequence[float]) -> None:
    """Ticks as plain numbers; within a decade or two more of them."""
    narrow = edges[1] / edges[0] < 100
    steps = (1, 2, 3, 5) if narrow else (1,)
    ticks = [step * 10.0**power for power in range(-3, 6) for step in steps if edges[0] <= step * 10.0**power <= edges[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" if tick < 10_000 else f"{tick:,.0f}" for tick in ticks])
        axis.set_ticks([], minor=True)


def _is_point(figure: Figure) -> bool:
    return figure.published is not None and figure.how != "exact"
