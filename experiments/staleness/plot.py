"""The picture of a sweep: learning, outcome, and the staleness that was really there. The only file that draws.

Needs matplotlib (the extra `experiments`). Called by `sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from experiments.staleness.analyze import MIN_SEEDS, CellResult, by_setting, estimate

Groups = dict[str, list[CellResult]]
# More columns than this leave no room for a number in each cell of the third panel.
_MOST_WRITTEN_AGES = 12
_FINEST_SCALE = 0.1


def draw(results: Sequence[CellResult], title: str, path: Path) -> None:
    """Write a PNG with three panels, one colour a setting in the order of the sweep."""
    groups = by_setting(results)
    figure = Figure(figsize=(14, 4.9), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12))
    curves, outcome, ages = figure.subplots(1, 3, width_ratios=[1.5, 1, 1.15])
    # The yellow end of the scale is not readable on white.
    scale = matplotlib.colormaps["viridis"].resampled(256)
    colours = [scale(0.88 * i / max(1, len(groups) - 1)) for i in range(len(groups))]
    _draw_curves(curves, groups, colours)
    _draw_outcome(outcome, groups, colours)
    _draw_ages(ages, groups)
    seeds = len({result.seed for result in results})
    for axes in (curves, outcome, ages):
        axes.title.set_fontsize("medium")
    figure.suptitle(
        f"{title}: {seeds} seed{'s' if seeds > 1 else ''}, {results[0].trained_samples:,} samples trained on per run"
    )
    figure.savefig(path)


def _draw_curves(axes: Any, groups: Groups, colours: Sequence[Any]) -> None:
    """Reward of each step: mean over seeds, and the range of the seeds as a band."""
    for (label, cells), colour in zip(groups.items(), colours, strict=True):
        points = [
            (step, [reward for reward in rewards if reward is not None])
            for step, rewards in enumerate(zip(*(cell.rewards for cell in cells), strict=False), 1)
        ]
        points = [(step, rewards) for step, rewards in points if rewards]
        steps = [step for step, _ in points]
        realised = sum(cell.staleness_mean for cell in cells) / len(cells)
        means = [sum(rewards) / len(rewards) for _, rewards in points]
        axes.plot(steps, means, color=colour, label=f"{label}  (realised mean {realised:.2f})")
        axes.fill_between(
            steps, [min(r) for _, r in points], [max(r) for _, r in points], color=colour, alpha=0.18, linewidth=0
        )
    axes.set(
        title="Training reward\nline: mean of the seeds, band: lowest to highest",
        xlabel="learner step",
        ylabel="mean reward of the batch",
    )
    axes.legend(loc="lower right", frameon=False, fontsize="small")
    _tidy(axes)


def _draw_outcome(axes: Any, groups: Groups, colours: Sequence[Any]) -> None:
    """Held-out reward at the end: a point a seed, a line at the mean, its interval where there is one."""
    for place, (cells, colour) in enumerate(zip(groups.values(), colours, strict=True)):
        ends = [cell.held_out_end.reward for cell in cells if cell.held_out_end.reward is not None]
        if (found := estimate(ends)) is None:
            continue
        # Points with equal values stay visible side by side.
        places = [place + 0.09 * (i - (len(ends) - 1) / 2) for i in range(len(ends))]
        axes.plot(places, ends, "o", color=colour, markersize=6, alpha=0.85)
        axes.errorbar(place, found.mean, yerr=found.half_width, color=colour, capsize=6, elinewidth=1.2)
        axes.hlines(found.mean, place - 0.32, place + 0.32, color=colour, linewidth=2)
    before = estimate(cell.held_out_start.reward for cells in groups.values() for cell in cells)
    axes.set(
        title=f"Held-out reward after training{'' if before is None else f' (before: {before.mean:.2f})'}\n{_marks(groups)}",
        ylabel="mean reward, greedy",
    )
    _name_settings(axes.set_xticks, groups, axes.set_xlabel)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    low, high = axes.get_ylim()
    # A scale no finer than chance among a few hundred held-out prompts.
    margin = max(0.0, (_FINEST_SCALE - (high - low)) / 2)
    axes.set_ylim(low - margin, high + margin)
    _tidy(axes)


def _marks(groups: Groups) -> str:
    fewest = min(len(cells) for cells in groups.values())
    return f"point: seed, line: mean{', bar: 95 % interval' if fewest >= MIN_SEEDS else ''}"


def _draw_ages(axes: Any, groups: Groups) -> None:
    """Share of trained tokens by age, a row a setting."""
    oldest = max(age for cells in groups.values() for cell in cells for age, _ in cell.staleness_tokens)
    shares = [_shares(cells, oldest) for cells in groups.values()]
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1, aspect="auto", origin="lower")
    for row, ages in enumerate(shares):
        for age, share in enumerate(ages):
            if share > 0 and oldest < _MOST_WRITTEN_AGES:
                text = "<1 %" if share < 0.005 else f"{share:.0%}".replace("%", " %")
                axes.text(age, row, text, ha="center", va="center", color="white" if share > 0.5 else "black", fontsize="small")
    axes.set(title="Realised staleness\nshare of trained tokens by age", xlabel="age of the token [learner steps]")
    if oldest < _MOST_WRITTEN_AGES:
        axes.set_xticks(range(oldest + 1))
    _name_settings(axes.set_yticks, groups, axes.set_ylabel)


def _shares(cells: Sequence[CellResult], oldest: int) -> list[float]:
    total = sum(cell.trained_tokens for cell in cells)
    counts = [0] * (oldest + 1)
    for cell in cells:
        for age, count in cell.staleness_tokens:
            counts[age] += count
    return [count / total for count in counts]


def _name_settings(set_ticks: Any, groups: Groups, set_label: Any) -> None:
    """Values at the ticks and the key as the axis' label, when one key is swept; else whole settings at the ticks."""
    settings = [cells[0].setting for cells in groups.values()]
    if len(settings[0]) == 1:
        set_ticks(range(len(groups)), [str(setting[0][1]) for setting in settings])
        set_label(settings[0][0][0])
    else:
        set_ticks(range(len(groups)), [label.replace(", ", "\n") for label in groups])


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
