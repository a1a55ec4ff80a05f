"""Published against predicted figures, each a point; on the diagonal they agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments.planning.validation.rows import Row

_PANELS = (("seconds, hours", {"s", "h"}), ("rates and sizes", {"PFLOP/s", "k tokens/s", "GB"}), ("gains", {""}))


def write(path: Path, rows: Sequence[Row]) -> None:
    """PNG. A panel for each kind of unit: hollow points were fitted, lines are the range of what is assumed."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(13, 5), layout="constrained")
    for number, (title, units) in enumerate(_PANELS):
        _draw(canvas.add_subplot(1, len(_PANELS), number + 1, title=title, xlabel="published", ylabel="predicted"), rows, units)
    canvas.savefig(path, dpi=110)


def _draw(axes: Any, rows: Sequence[Row], units: set[str]) -> None:
    values = list[float]()
    for place, row in enumerate(rows):
        color, marker, label = f"C{place % 10}", "os^D"[place // 10 * 2 + place % 2], row.name
        for each in row.figures:
            if each.published is None or each.how == "exact" or each.unit not in units:
                continue
            values += [each.published, each.predicted]
            if each.span:
                axes.vlines(each.published, *each.span, color=color, linewidth=0.8, alpha=0.5)
            axes.scatter(
                each.published,
                each.predicted,
                s=22,
                marker=marker,
                edgecolors=color,
                facecolors="white" if each.how == "fitted" else color,
                label="" if each.how == "fitted" else label,
                zorder=3,
            )
            label = label if each.how == "fitted" else ""  # once a row
    if not values:
        return
    edges = [min(values) / 1.3, max(values) * 1.3]
    axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges)
    axes.plot(edges, edges, color="0.4", linewidth=1)
    axes.fill_between(edges, [edge / 2 for edge in edges], [edge * 2 for edge in edges], color="0.93", label="within 2 times")
    axes.scatter([], [], s=22, edgecolors="0.3", facecolors="white", label="fitted (hollow)")
    axes.legend(fontsize=7, ncols=2, loc="upper left")
