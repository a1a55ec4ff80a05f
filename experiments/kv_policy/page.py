"""The picture and the table of what was measured. Needs matplotlib (the extra `experiments`).

Intervals are 95 % t intervals over texts or blocks of prompts; differences between arms are within a text or block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from async_rlhf.experiments.kv_policy.arms import ARMS, FULL
from async_rlhf.experiments.kv_policy.rows import Row
from async_rlhf.experiments.statistics import estimate

# The colours are those of Okabe and Ito.
_LOOKS = {
    "window": ("#0072B2", "o", "-"),
    "interval": ("#E69F00", "^", "--"),
    "last": ("#009E73", "D", "-."),
    "first": ("#D55E00", "s", ":"),
    FULL: ("#000000", "x", "-"),
}
_MEASURES = {
    ("prose", "nll"): "prose, pretrained 135M: nats a token",
    ("prose", "kl"): "prose: KL(kept ‖ full), nats a token",
    ("task", "reward"): "task, tiny speller: greedy reward",
    ("task", "kl"): "task: KL(engine ‖ model), nats a token",
    ("cost", "bytes"): "keys and values of 8 rows, MB",
    ("cost", "tokens_per_s"): "tokens a second, 8 rows",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each measure that there is."""
    shown = [each for each in _MEASURES if any((row.experiment, row.measure) == each for row in rows)]
    columns = -(-len(shown) // 2)
    figure = Figure(figsize=(4.4 * columns, 7.2), layout="constrained")
    for axes, (experiment, measure) in zip(figure.subplots(2, columns, squeeze=False).T.flatten(), shown, strict=False):
        found = [row for row in rows if (row.experiment, row.measure) == (experiment, measure)]
        if experiment == "cost":
            _draw_cost(axes, found)
        else:
            _draw_budgets(axes, found)
        axes.set_title(_MEASURES[experiment, measure], fontsize="medium")
    handles = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=100)


def _draw_budgets(axes: Any, rows: Sequence[Row]) -> None:
    budgets = sorted({row.budget for row in rows if row.arm != FULL})
    for number, (arm, label) in enumerate(ARMS.items()):
        colour, marker, dashes = _LOOKS[arm]
        found = [_mean([row.value for row in rows if (row.arm, row.budget) == (arm, budget)]) for budget in budgets]
        places = np.arange(len(budgets)) + 0.06 * (number - 1.5)  # side by side, so that intervals are seen
        axes.errorbar(
            places, [mean for mean, _ in found], [half for _, half in found],
            color=colour, marker=marker, linestyle=dashes, label=label, capsize=2,
        )  # fmt: skip
    if full := [row.value for row in rows if row.arm == FULL]:
        axes.axhline(float(np.mean(full)), color=_LOOKS[FULL][0], linewidth=1, label="full attention")
    axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    axes.set_xlabel("tokens kept")


def _draw_cost(axes: Any, rows: Sequence[Row]) -> None:
    lengths = sorted({row.case for row in rows})
    for arm in (FULL, "window", "first"):
        colour, marker, dashes = _LOOKS[arm]
        found = sorted((lengths.index(row.case), _shown(row)) for row in rows if row.arm == arm)
        label = "full attention" if arm == FULL else ARMS[arm]
        axes.plot(*zip(*found, strict=True), color=colour, marker=marker, linestyle=dashes, label=label)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a row")


def table(rows: Sequence[Row]) -> str:
    """Markdown: of each measure and budget the mean of every arm, and in brackets its difference from the window alone."""
    lines = []
    for experiment, measure in _MEASURES:
        found = [row for row in rows if (row.experiment, row.measure) == (experiment, measure)]
        if found:
            lines += [f"**{_MEASURES[experiment, measure]}**", "", *(_costs if experiment == "cost" else _budgets)(found), ""]
    return "\n".join(lines)


def _budgets(rows: Sequence[Row]) -> Iterator[str]:
    full = [row.value for row in rows if row.arm == FULL]
    yield f"| kept | {' | '.join(ARMS)} |"
    yield "| --- " * (1 + len(ARMS)) + "|"
    for budget in sorted({row.budget for row in rows if row.arm != FULL}):
        values = {arm: {row.case: row.value for row in rows if (row.arm, row.budget) == (arm, budget)} for arm in ARMS}
        cells = []
        for arm, own in values.items():
            gap, half = _mean([own[case] - values["window"][case] for case in own])
            cells.append(f"{np.mean(list(own.values())):.3f}" + (f" ({gap:+.3f} ± {half:.3f})" if arm != "window" else ""))
        yield f"| {budget} | {' | '.join(cells)} |"
    if full:
        yield f"| all | {abs(np.mean(full)):.3f} |" + " |" * (len(ARMS) - 1)


def _costs(rows: Sequence[Row]) -> Iterator[str]:
    arms = (FULL, "window", "first")
    yield f"| tokens of a row | {' | '.join(arms)} |"
    yield "| --- " * (1 + len(arms)) + "|"
    for length in sorted({row.case for row in rows}):
        values = {row.arm: _shown(row) for row in rows if row.case == length}
        yield f"| {length:,} | {' | '.join(f'{values[arm]:.3g}' for arm in arms)} |"


def _shown(row: Row) -> float:
    return row.value / 1e6 if row.measure == "bytes" else row.value


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """With half the width of its 95 % t interval; 0 of fewer than three."""
    found = estimate(values)
    return (np.nan, 0.0) if found is None else (found.mean, found.half_width or 0.0)
