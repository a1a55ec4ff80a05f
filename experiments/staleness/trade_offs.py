"""The second picture of a sweep: what reward cost in samples and tokens, what corrections did, how far the policy moved.

Panels for which no cell kept a number are left out. Needs matplotlib (the extra `experiments`). Called by `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from async_rlhf.experiments.staleness.cells import CellResult
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.staleness.outcomes import BLOCK, SMOOTHED, path, reached, scores_apart, smoothed, target
from async_rlhf.experiments.staleness.plot import Setting, settings_of, title, widen
from async_rlhf.inspect.plot import COLOURS, tidy

_LEGEND_COLUMNS = 4
_MOST_TICKS = 5
# What reward costs, by the names that results have for it.
_COSTS = {"samples": "completions trained on", "tokens": "tokens trained on", "seconds": "training time [s]"}
# What corrections did, by the same, and the look of its marks.
_SHARES = {
    "is_ess_mean": {"label": "effective sample size", "marker": "o", "color": COLOURS[0]},
    "clip_ratio_mean": {"label": "clipped", "marker": "^", "color": COLOURS[1]},
}
_MARK = {"linestyle": "", "markersize": 5, "alpha": 0.85}
Settings = Sequence[Setting]
# Places with a number of each, and their look in the words of matplotlib's `plot`.
_Line = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True)
class _Panel:
    """finish: sets limits of its axes and writes into them, when the lines of its block are drawn."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[_Line]
    finish: Callable[[Any], None]


@dataclass(frozen=True)
class _Block:
    """Panels side by side, in as many rows as they need. shared: they have the same axes (`x` too, or `y` alone), and the
    labels of y stand beside the first. height: of a row, in inches."""

    panels: Sequence[_Panel]
    columns: int
    height: float = 3.7
    shared: str = ""

    @property
    def rows(self) -> int:
        return -(-len(self.panels) // self.columns)


def picture(results: Sequence[CellResult], sweep: SweepConfig, command: str = "") -> Figure:
    """A panel for each quantity that was kept, in the colours of the first picture; dashes and marks are its columns."""
    settings = settings_of(results)
    blocks = [block for block in _blocks(results, settings) if block.panels]
    heights = [block.height * block.rows for block in blocks]
    below = 0.18 * -(-sum(1 + setting.row.count("\n") for setting in settings) // _LEGEND_COLUMNS)
    figure = Figure(figsize=(14.5, sum(heights) + below + 1.0), dpi=110, layout="constrained")
    parts: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    for block, part in zip(blocks, parts[:, 0], strict=True):
        _draw(part, block)
    handles = [Line2D([], [], **setting.look, markersize=4, label=setting.row) for setting in settings]
    look: dict[str, Any] = {"handlelength": 4, "frameon": False, "fontsize": "small"}
    figure.legend(handles=handles, loc="outside lower center", ncols=_LEGEND_COLUMNS, **look)
    figure.suptitle(title(results, sweep, command), wrap=True, fontsize="medium")
    return figure


def _draw(part: Any, block: _Block) -> None:
    sharey, sharex = bool(block.shared), block.shared == "x"
    places = list(part.subplots(block.rows, block.columns, squeeze=False, sharex=sharex, sharey=sharey).flat)
    for spare in places[len(block.panels) :]:
        spare.remove()
    drawn = list(zip(block.panels, places, strict=False))
    for panel, axes in drawn:
        for points, look in panel.lines:
            if points:
                axes.plot(*zip(*points, strict=True), **look)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.title.set_fontsize("medium")
        tidy(axes, grid="both")
        axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    for panel, axes in drawn:
        panel.finish(axes)
        if block.shared:
            axes.label_outer()


def _blocks(results: Sequence[CellResult], settings: Settings) -> list[_Block]:
    """Those that no cell has numbers for are empty. Divergences from the reference have a panel for each column."""
    value = None if (goal := target(results)) is None else goal.value
    columns = list(dict.fromkeys(setting.column for setting in settings))
    inside = [[setting for setting in settings if setting.column == column] for column in columns]
    paths = [_known(_over_reference(each, name) for each in inside) for name in scores_apart(results) or [""]]
    over_samples, *others = (_course(settings, what, goal=value) for what in _COSTS)
    lengths = _course(settings, "samples", "Completion length", "mean length [tokens]", "completions/mean_length")
    # of one's own age everything is known: all tokens are effective, and the divergence is the engine's arithmetic
    apart = [_corrections(results), _to_sampler(settings)] if any(cell.staleness_mean > 0 for cell in results) else []
    # one panel is there of runs without rewards too
    panels = [over_samples, *_known([*others, lengths, *apart])]
    if len(columns) == 1:
        panels, paths = [*panels, *(panel for each in paths for panel in each)], []
    costs = [] if value is None else [_cost(settings, what, value) for what in ("samples", "seconds")]
    row = 0.1 + 0.11 * (1 + settings[0].row.count("\n"))
    return [
        _Block(panels, 2 if len(panels) == 4 else 3),
        *(_Block(each, min(3, len(each)), shared="x") for each in paths),
        _Block(_known(costs), 2, height=1.3 + row * len(settings), shared="y"),
    ]


def _known(panels: Iterable[_Panel]) -> list[_Panel]:
    return [panel for panel in panels if any(points for points, _ in panel.lines)]


def _course(settings: Settings, what: str, of: str = "Training reward", unit: str = "mean reward", curve: str = "",
            goal: float | None = None) -> _Panel:  # fmt: skip
    """A smoothed curve, of the reward where its name is empty, over what had been spent."""

    def course(cell: CellResult) -> list[tuple[float, float | None]]:
        return list(zip(getattr(cell, what) or (), smoothed(cell, curve), strict=False))

    def finish(axes: Any) -> None:
        axes.set_xlim(left=0)
        if goal is not None:
            axes.axhline(goal, color="0.4", linewidth=0.8, linestyle=":")
            box = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0}
            # curves begin low: the left is free
            axes.annotate(f"target {goal:.2f}", (0.01, goal), xycoords=("axes fraction", "data"), va="bottom",
                          fontsize="x-small", color="0.3", bbox=box)  # fmt: skip

    lines = [(_means(each, course), {**each.look, "marker": "", "linewidth": 1.3}) for each in settings]
    words = f"{of} over {what}\nmean of the seeds and of {SMOOTHED} completions"
    return _Panel(words, _COSTS[what], unit, lines, finish)


def _over_reference(settings: Settings, name: str) -> _Panel:
    """Of one reward function, of their sum where the name is empty; the settings of one column."""
    look = {"markersize": 4, "linewidth": 1, "alpha": 0.85}
    lines = [(_means(each, lambda cell: path(cell, name)), {**each.look, **look}) for each in settings]
    what, where = name or "reward", settings[0].column and f"{settings[0].column}; "
    words = f"Training {what} over KL to the reference\n{where}a mark: {BLOCK} completions of each seed"
    return _Panel(words, "KL(policy that sampled, reference) [nats a token]", f"mean {what}", lines, widen)


def _means(setting: Setting, course: Callable[[CellResult], Sequence[Any]]) -> list[Any]:
    """Over the seeds, where all have a number. course: places along training and numbers of a cell."""
    places = zip(*filter(None, map(course, setting.cells)), strict=False)
    return [np.mean(place, axis=0) for place in places if all(y is not None for _, y in place)]


def _corrections(results: Sequence[CellResult]) -> _Panel:
    """A mark a cell, over what its staleness really was."""
    look = {**_MARK, "alpha": 0.7}
    lines = [(_pairs(results, "staleness_mean", number), {**look, **each}) for number, each in _SHARES.items()]

    def finish(axes: Any) -> None:
        axes.set_ylim(-0.03, 1.03)
        axes.legend(fontsize="x-small", frameon=False)

    words = "Effective and clipped tokens by staleness\na mark a run"
    return _Panel(words, "mean staleness of the run [learner steps]", "share of tokens", lines, finish)


def _to_sampler(settings: Settings) -> _Panel:
    names, look = ("kl_behaviour_mean", "held_out_end.reward"), {**_MARK, "markersize": 6}
    lines = [(_pairs(each.cells, *names), {**each.look, **look}) for each in settings]
    words = "Held-out reward over KL to the sampling policy\na mark a run; KL is a mean over steps"
    return _Panel(words, "KL(sampler, learner) [nats a token]", "held-out reward, end", lines, widen)


def _pairs(cells: Sequence[CellResult], *names: str) -> list[tuple[float, float]]:
    """Both numbers of each cell that has both."""
    return [pair for pair in map(attrgetter(*names), cells) if None not in pair]


def _cost(settings: Settings, what: str, goal: float) -> _Panel:
    lines, counts = list[_Line](), list[str]()
    for row, setting in enumerate(settings):
        runs = [reached(cell, goal) for cell in setting.cells]
        known = [(getattr(run, what), row) for run in runs if run is not None]
        lines.append((known, {**setting.look, **_MARK, "marker": "o"}))
        counts.append(f"{len(known)} of {len(runs)}")

    def finish(axes: Any) -> None:
        for row, count in enumerate(counts):
            axes.annotate(count, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize="x-small")
        axes.set_yticks(range(len(settings)), [setting.row for setting in settings], fontsize="x-small")
        axes.set_ylim(len(settings) - 0.4, -0.6)
        axes.set_xlim(left=0)

    words = f"{what.capitalize()} to the target of {goal:.3f}\na mark a run; on the right how many reached it"
    return _Panel(words, _COSTS[what], "", lines, finish)
