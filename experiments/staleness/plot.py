"""The picture of a sweep: learning, outcome, and the staleness that was really there. The only file that draws.

Where two keys are swept, learning has a panel for each value of the first and a colour for each value of the second.

Needs matplotlib (the extra `experiments`). Called by `sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from async_rlhf.experiments.staleness.analyze import MIN_SEEDS, CellResult, by_setting, estimate

Groups = dict[str, list[CellResult]]
# More columns than this leave no room for a number in each cell of the third panel.
_MOST_WRITTEN_AGES = 12
_FINEST_SCALE = 0.1
_BAND = "line: mean of the seeds, band: lowest to highest"


@dataclass(frozen=True)
class _Placed:
    """Where the runs of one setting stand on the axis of settings, how far they reach to either side, and their colour."""

    cells: list[CellResult]
    place: float
    reach: float
    colour: Any


def draw(results: Sequence[CellResult], title: str, path: Path) -> None:
    """Write `picture` as a PNG."""
    picture(results, title).savefig(path)


def picture(results: Sequence[CellResult], title: str) -> Figure:
    """Learning, outcome and ages; settings keep the order of the sweep."""
    groups = by_setting(results)
    keys = [key for key, _ in results[0].setting]
    figure = _two_keys(groups, keys) if len(keys) == 2 else _one_row(groups)
    for axes in figure.axes:
        axes.title.set_fontsize("medium")
    seeds = len({result.seed for result in results})
    figure.suptitle(
        f"{title}: {seeds} seed{'s' if seeds > 1 else ''}, {results[0].trained_samples:,} samples trained on per run"
    )
    return figure


def _one_row(groups: Groups) -> Figure:
    """Three panels, a colour a setting."""
    figure = Figure(figsize=(14, 4.9), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12))
    curves, outcome, ages = figure.subplots(1, 3, width_ratios=[1.5, 1, 1.15])
    colours = _colours(range(len(groups)))
    _draw_curves(curves, groups, colours)
    curves.set_title(f"Training reward\n{_BAND}")
    _draw_outcome(outcome, [_Placed(cells, i, 0.32, colours[i]) for i, cells in enumerate(groups.values())])
    _name_settings(outcome.set_xticks, groups, outcome.set_xlabel)
    _draw_ages(ages, groups)
    _name_settings(ages.set_yticks, groups, ages.set_ylabel)
    return figure


def _two_keys(groups: Groups, keys: Sequence[str]) -> Figure:
    """Above, learning: a panel for each value of the first key. Below, outcome and ages of all settings."""
    by_value: dict[str, Groups] = {}
    for cells in groups.values():
        (_, first), (_, second) = cells[0].setting
        by_value.setdefault(str(first), {})[str(second)] = cells
    values = {second: cells[0].setting[1][1] for inside in by_value.values() for second, cells in inside.items()}
    inner, colour = list(values), dict(zip(values, _colours(list(values.values())), strict=True))
    figure = Figure(figsize=(max(14, 4.6 * len(by_value)), 9.6), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    panels = above.subplots(1, len(by_value), sharey=True, squeeze=False)[0]
    for axes, (value, inside) in zip(panels, by_value.items(), strict=True):
        _draw_curves(axes, inside, [colour[second] for second in inside])
        axes.set_title(f"Training reward, {keys[0]} {value}\n{_BAND}")
    outcome, ages = below.subplots(1, 2, width_ratios=[1.6, 1])
    share = 0.84 / len(inner)
    placed = [
        _Placed(cells, x + share * (inner.index(second) - (len(inner) - 1) / 2), 0.42 * share, colour[second])
        for x, inside in enumerate(by_value.values())
        for second, cells in inside.items()
    ]
    _draw_outcome(outcome, placed)
    outcome.set_xticks(range(len(by_value)), list(by_value))
    outcome.set_xlabel(f"{keys[0]}, beside one another {keys[1]} in the colours above")
    _draw_ages(ages, groups)
    names = [", ".join(str(value) for _, value in cells[0].setting) for cells in groups.values()]
    ages.set_yticks(range(len(groups)), names, fontsize="small")
    return figure


def _colours(values: Sequence[Any]) -> list[Any]:
    """Words have distinct colours, numbers a scale."""
    if any(isinstance(value, str) for value in values) and len(values) <= 10:
        return [matplotlib.colormaps["tab10"](i) for i in range(len(values))]
    # The yellow end of the scale is not readable on white.
    scale = matplotlib.colormaps["viridis"].resampled(256)
    return [scale(0.88 * i / max(1, len(values) - 1)) for i in range(len(values))]


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
    axes.set(xlabel="learner step", ylabel="mean reward of the batch")
    axes.legend(loc="best", frameon=False, fontsize="small")
    _tidy(axes)


def _draw_outcome(axes: Any, settings: Sequence[_Placed]) -> None:
    """Held-out reward at the end: a point a seed, a line at the mean, its interval where there is one."""
    for setting in settings:
        ends = [cell.held_out_end.reward for cell in setting.cells if cell.held_out_end.reward is not None]
        if (found := estimate(ends)) is None:
            continue
        place, reach, colour = setting.place, setting.reach, setting.colour
        # Points with equal values stay visible side by side.
        places = [place + 0.28 * reach * (i - (len(ends) - 1) / 2) for i in range(len(ends))]
        axes.plot(places, ends, "o", color=colour, markersize=6, alpha=0.85)
        axes.errorbar(place, found.mean, yerr=found.half_width, color=colour, capsize=6, elinewidth=1.2)
        axes.hlines(found.mean, place - reach, place + reach, color=colour, linewidth=2)
    before = estimate(cell.held_out_start.reward for setting in settings for cell in setting.cells)
    axes.set(
        title=f"Held-out reward after training{'' if before is None else f' (before: {before.mean:.2f})'}\n{_marks(settings)}",
        ylabel="mean reward, greedy",
    )
    axes.set_xlim(settings[0].place - settings[0].reach - 0.28, settings[-1].place + settings[-1].reach + 0.28)
    low, high = axes.get_ylim()
    # A scale no finer than chance among a few hundred held-out prompts.
    margin = max(0.0, (_FINEST_SCALE - (high - low)) / 2)
    axes.set_ylim(low - margin, high + margin)
    _tidy(axes)


def _marks(settings: Sequence[_Placed]) -> str:
    fewest = min(len(setting.cells) for setting in settings)
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
