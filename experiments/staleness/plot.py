"""The pictures of a sweep, each in blocks of panels: `results`, learning over steps and over seconds, the outcome, and the
staleness that was really there; `trade_offs`, what reward cost, what corrections did, how far the policy moved.

Where two keys are swept, there is a column for each value of the first and a colour for each value of the second. Panels for
which no cell kept a number are left out. Needs matplotlib (the extra `experiments`). Called by `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from async_rlhf.experiments.staleness.config import SweepConfig, shown
from async_rlhf.experiments.staleness.outcomes import path, reached, target
from async_rlhf.experiments.staleness.table import BLOCK, SMOOTHED, SPENT, Frame, Table
from async_rlhf.experiments.statistics import MIN_SEEDS, estimate
from async_rlhf.inspect.plot import COLOURS, tidy

# More columns than this leave no room for a number in each cell of the ages.
_MOST_WRITTEN_AGES = 12
_FEWEST_AGES = 4
# More neighbours on a scale of colours than this differ in dashes too.
_MOST_SOLID = 5
# Dashes and marker of settings that share a colour, by the value of the first key.
_LOOKS: tuple[tuple[Any, str], ...] = (
    ("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (7, 1, 1, 1, 1, 1)), "v"), ((0, (5, 4)), "P"), ((0, (1, 3)), "X"),
    ((0, (3, 1, 3, 1, 1, 1)), "<"),
)  # fmt: skip
_FINEST_SCALE = 0.1
"""The least width of an axis of held-out rewards: chance among a few hundred prompts is no more than this."""
_LEGEND_COLUMNS = 4
_MOST_TICKS = 5
# What learning is drawn over: the title of a panel alone, and its axis.
_PLACES = {
    "step": ("Training reward over steps", "learner step"),
    "seconds": ("Training reward over time", "training time [s], mean of the seeds"),
}
# What reward costs.
_COSTS = {"samples": "completions trained on", "tokens": "tokens trained on", "seconds": "training time [s]"}
_MARK = {"linestyle": "", "markersize": 5, "alpha": 0.85}


class PlottedSetting(NamedTuple):
    """The runs of one setting: the column and the name of their curve, the name of their row, and their look in the words of
    matplotlib's `plot`: colour, and the dashes and the marker that tell it from others of that colour."""

    runs: list[int]
    column: str
    curve: str
    row: str
    look: dict[str, Any]


class _Panel(NamedTuple):
    """One diagram. lines: points (`x`, `y`) of each, and its look. finish: sets limits of its axes and writes into them, when
    the lines of its block are drawn."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[tuple[Frame, dict[str, Any]]]
    finish: Callable[[Any], None]
    grid: str = "both"


class _Block(NamedTuple):
    """Panels side by side, in as many rows as they need. height: of a row, in inches. shared: they have the same axes (`xy`),
    the same y (`y`), or the same y and in a row the same x (`row`)."""

    panels: Sequence[_Panel]
    columns: int
    height: float
    shared: str = ""


def pictures(table: Table, sweep: SweepConfig, command: str = "") -> dict[str, Figure]:
    """The figures by the names of their files. Above each the question, what was run, and the command that made it."""
    seeds = f"{len(sweep.seeds)} seed{'s' if len(sweep.seeds) > 1 else ''}"
    budget = f"{table.cells['trained_samples'][0]:,} samples trained on per run"
    title = "\n".join([sweep.question, f"{sweep.name}: {sweep.grid}; {seeds}, {budget}", *([command] if command else [])])
    settings = settings_of(table)
    return {"results": _results(table, settings, title), "trade_offs": _trade_offs(table, settings, title)}


def settings_of(table: Table) -> list[PlottedSetting]:
    """Every setting with its names and its colour."""
    given = {result.label: result.setting for result in table.results}
    places = range(len(table.axes))
    # a key with one value among the results, as in a sweep that is not finished, tells nothing apart
    varied = [i for i in places if len({str(setting[i][1]) for setting in given.values()}) > 1] or [places[-1]]
    by_column = len(varied) == 2
    curves = {label: shown(setting[i] for i in varied[by_column:]) for label, setting in given.items()}
    # The value behind each curve: a setting of three keys has none, its name is a word.
    values = {curves[label]: setting[varied[-1]][1] if len(varied) <= 2 else label for label, setting in given.items()}
    colours = dict(zip(values, _colours(list(values.values())), strict=True))
    columns = {label: shown([setting[varied[0]]]) if by_column else "" for label, setting in given.items()}
    order = list(dict.fromkeys(columns.values()))
    settings = []
    for number, (label, runs) in enumerate(table.settings.items()):
        style, marker = _LOOKS[order.index(columns[label]) % len(_LOOKS)]
        if not by_column and number % 2 and len(given) > _MOST_SOLID:
            style = "--"
        look = {"color": colours[curves[label]], "linestyle": style, "marker": marker}
        curve, row = (name.replace(", ", "\n") for name in (curves[label], label))
        settings.append(PlottedSetting(runs, columns[label], curve, row, look))
    return settings


def _colours(values: Sequence[Any]) -> list[Any]:
    """Words have distinct colours, numbers a scale; readers who see few colours can tell both apart."""
    if any(isinstance(value, str) for value in values) and len(values) <= len(COLOURS):
        return list(COLOURS[: len(values)])
    # The yellow end of the scale is not readable on white.
    return [matplotlib.colormaps["viridis"].resampled(256)(0.8 * i / max(1, len(values) - 1)) for i in range(len(values))]


def _results(table: Table, settings: Sequence[PlottedSetting], title: str) -> Figure:
    """Above, learning; below, a row for each setting with its outcome and its ages, in the order of the sweep."""
    columns = _columns(settings)
    is_one = len(columns) == 1
    legend_lines = sum(1 + curve.count("\n") for curve in {setting.curve for setting in settings})
    learning, row = max(4.0 if is_one else 6.0, 1.2 + 0.2 * legend_lines), 0.2 + 0.16 * len(table.axes)
    panels = [_learning(table, inside, over, is_one) for over in _PLACES for inside in columns]
    blocks = [
        _Block(panels, 2, learning, "y") if is_one else _Block(panels, len(columns), learning / 2, "row"),
        _Block([_outcome(table, settings), _ages(table, settings)], 2, 1.3 + row * len(settings), "y"),
    ]
    figure, parts = _draw(blocks, max(13.0, 3.4 * len(columns)), title)
    names = {line.get_label(): line for axes in parts[0].axes for line in axes.lines}
    above = "line: mean of the seeds\nband: lowest to highest" if max(table.seeds) > 1 else None
    parts[0].legend(names.values(), names, loc="outside right upper", frameon=False, title=above, alignment="left")
    return figure


def _trade_offs(table: Table, settings: Sequence[PlottedSetting], title: str) -> Figure:
    """A panel for each quantity that was kept; divergences from the reference have one for each column."""
    goal, columns = target(table), _columns(settings)
    paths = [_known(_over_reference(table, inside, name) for inside in columns) for name in table.scores or [""]]
    over_samples, *others = (_course(table, settings, spent, goal=goal.value if goal else None) for spent in SPENT)
    lengths = _course(table, settings, "samples", "Completion length", "mean length [tokens]", "completions/mean_length")
    # of one's own age everything is known: all tokens are effective, and the divergence is the engine's arithmetic
    apart = [_corrections(table), _to_sampler(table, settings)] if table.cells["staleness_max"].any() else []
    # one panel is there of runs without rewards too
    panels = [over_samples, *_known([*others, lengths, *apart])]
    if len(columns) == 1:
        panels, paths = [*panels, *(panel for along in paths for panel in along)], []
    costs = _known(_cost(table, settings, spent, goal.value) for spent in ("samples", "seconds")) if goal else []
    row = 0.1 + 0.11 * (1 + settings[0].row.count("\n"))
    blocks = [
        _Block(panels, 2 if len(panels) == 4 else 3, 3.7),
        *(_Block(along, min(3, len(along)), 3.7, "xy") for along in paths if along),
        *([_Block(costs, 2, 1.3 + row * len(settings), "y")] if costs else []),
    ]
    below = 0.18 * -(-sum(1 + setting.row.count("\n") for setting in settings) // _LEGEND_COLUMNS)
    figure, _ = _draw(blocks, 14.5, title, below)
    handles = [Line2D([], [], **setting.look, markersize=4, label=setting.row) for setting in settings]
    look: dict[str, Any] = {"handlelength": 4, "frameon": False, "fontsize": "small"}
    figure.legend(handles=handles, loc="outside lower center", ncols=_LEGEND_COLUMNS, **look)
    return figure


def _columns(settings: Sequence[PlottedSetting]) -> list[list[PlottedSetting]]:
    return [[each for each in settings if each.column == column] for column in dict.fromkeys(s.column for s in settings)]


def _known(panels: Iterable[_Panel]) -> list[_Panel]:
    return [panel for panel in panels if not all(points.empty for points, _ in panel.lines)]


def _draw(blocks: Sequence[_Block], width: float, title: str, below: float = 0.0) -> tuple[Figure, list[Any]]:
    """The figure, and the part of each block. below: inches for a legend."""
    rows = [-(-len(block.panels) // block.columns) for block in blocks]
    heights = [block.height * count for block, count in zip(blocks, rows, strict=True)]
    figure = Figure(figsize=(width, sum(heights) + below + 1.0), dpi=110, layout="constrained")
    parts: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, block, count in zip(parts, blocks, rows, strict=True):
        sharex: Any = {"xy": True, "row": "row"}.get(block.shared, False)
        places = part.subplots(count, block.columns, squeeze=False, sharex=sharex, sharey=bool(block.shared)).ravel()
        for spare in places[len(block.panels) :]:
            spare.remove()
        for panel, axes in zip(block.panels, places, strict=False):
            for points, look in panel.lines:
                axes.plot(points["x"], points["y"], **look)
            axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
            axes.set_title(panel.title, fontsize="medium")
            tidy(axes, grid=panel.grid)
            axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        for panel, axes in zip(block.panels, places, strict=False):
            panel.finish(axes)
            if block.shared == "row":
                axes.yaxis.label.set_visible(axes.get_subplotspec().is_first_col())
            elif block.shared:
                axes.label_outer()
    figure.suptitle(title, wrap=True, fontsize="medium")
    return figure, list(parts)


def _learning(table: Table, settings: Sequence[PlottedSetting], over: str, is_one: bool) -> _Panel:
    """Reward of each step: mean over seeds, and the range of the seeds as a band; over the step, or over the seconds that it
    ended after, mean over seeds. is_one: there is no other column."""
    both = table.steps.assign(step=table.steps.index.get_level_values("step"))[[over, "reward"]]
    styles = ["--" if i % 2 and len(settings) > _MOST_SOLID else "-" for i in range(len(settings))]
    lines = [(_means(both, each.runs), {"color": each.look["color"], "linestyle": style, "label": each.curve})
             for each, style in zip(settings, styles, strict=True)]  # fmt: skip

    def finish(axes: Any) -> None:
        for points, look in lines:
            axes.fill_between(points["x"], points["low"], points["high"], color=look["color"], alpha=0.13, linewidth=0)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=over == "step"))

    alone, label = _PLACES[over]
    words = alone if is_one else settings[0].column if over == "step" else ""
    return _Panel(words, label, "mean reward of the batch", lines, finish, "y")


def _outcome(table: Table, settings: Sequence[PlottedSetting]) -> _Panel:
    """Held-out reward at the end: a point a seed, a line at the mean, its interval where there is one."""

    def finish(axes: Any) -> None:
        for row, setting in enumerate(settings):
            ends, colour = table.cells["held_out_reward_end"][setting.runs].dropna(), setting.look["color"]
            if (end := estimate(ends)) is None:
                axes.annotate("not measured", (0.5, row), xycoords=("axes fraction", "data"), ha="center", va="center")
                continue
            # Points with equal values stay visible one above the other.
            places = row + 0.09 * (np.arange(len(ends)) - (len(ends) - 1) / 2)
            axes.plot(ends, places, "o", color=colour, markersize=5, alpha=0.85)
            axes.errorbar(end.mean, row, xerr=end.half_width, color=colour, capsize=5, elinewidth=1.2)
            axes.vlines(end.mean, row - 0.32, row + 0.32, color=colour, linewidth=2)
        _widen(axes, "x")
        axes.set_yticks(range(len(settings)), [setting.row for setting in settings])

    before = estimate(table.cells["held_out_reward_start"])
    start = "" if before is None else f" (before: {before.mean:.2f})"
    interval = ", bar: 95 % interval" if min(table.seeds) >= MIN_SEEDS else "; too few seeds for an interval"
    words = f"Held-out reward after training{start}\npoint: seed, line: mean{interval}"
    return _Panel(words, "mean reward, greedy", "", [], finish, "x")


def _ages(table: Table, settings: Sequence[PlottedSetting]) -> _Panel:
    """Share of trained tokens by age, a row a setting, and the mean age beside it."""
    # of fresh data alone the panel would be one black field
    oldest = max(_FEWEST_AGES - 1, table.cells["staleness_max"].max())
    tokens = [table.ages.loc[setting.runs].sum().reindex(range(oldest + 1), fill_value=0.0) for setting in settings]
    shares = np.array([by_age / by_age.sum() for by_age in tokens])

    def finish(axes: Any) -> None:
        axes.grid(False)
        axes.spines[:].set_visible(True)
        axes.imshow(shares, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        for (row, age), share in np.ndenumerate(shares) if oldest < _MOST_WRITTEN_AGES else ():
            if share > 0:
                text = "<1 %" if share < 0.005 else f"{share:.0%}".replace("%", " %")
                axes.text(age, row, text, ha="center", va="center", color="white" if share > 0.5 else "black", fontsize="small")
        for row, setting in enumerate(settings):
            _beside(axes, row, f"mean {table.cells['staleness_mean'][setting.runs].mean():.2f}", "small")
        if oldest < _MOST_WRITTEN_AGES:
            axes.set_xticks(range(oldest + 1))

    title = "Realised staleness\nshare of trained tokens by age"
    return _Panel(title, "age of the token [learner steps]", "", [], finish)


def _course(table: Table, settings: Sequence[PlottedSetting], over: str, of: str = "Training reward", unit: str = "mean reward",
            curve: str = "reward", goal: float | None = None) -> _Panel:  # fmt: skip
    """A smoothed curve over what had been spent."""
    both = table.smoothed.reindex(columns=[over, curve])
    lines = [(_means(both, each.runs), {**each.look, "marker": "", "linewidth": 1.3}) for each in settings]

    def finish(axes: Any) -> None:
        axes.set_xlim(left=0)
        if goal is not None:
            axes.axhline(goal, color="0.4", linewidth=0.8, linestyle=":")
            box = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0}
            # curves begin low: the left is free
            axes.annotate(f"target {goal:.2f}", (0.01, goal), xycoords=("axes fraction", "data"), va="bottom",
                          fontsize="x-small", color="0.3", bbox=box)  # fmt: skip

    return _Panel(
        f"{of} over {over}\nmean of the seeds and of {SMOOTHED} completions", _COSTS[over], unit, lines, finish
    )  # fmt: skip


def _over_reference(table: Table, settings: Sequence[PlottedSetting], name: str) -> _Panel:
    """The score by one reward function, by all where the name is empty; the settings of one column."""
    along, score, where = path(table, name), name or "reward", settings[0].column and f"{settings[0].column}; "
    lines = [(_means(along, each.runs), {**each.look, "markersize": 4, "linewidth": 1, "alpha": 0.85}) for each in settings]
    words = f"Training {score} over KL to the reference\n{where}a mark: {BLOCK} completions of each seed"
    return _Panel(words, "KL(policy that sampled, reference) [nats a token]", f"mean {score}", lines, _widen)


def _means(both: Frame, runs: list[int]) -> Frame:
    """Points of a setting: of each step or block the means over the seeds, where all that have any number have one, and `low`
    and `high` of the second number."""
    of_these = both[both.index.isin(runs, level="run")]
    x, y = (of_these[name].unstack("run").dropna(axis=1, how="all").dropna() for name in both)
    return x.mean(axis=1).to_frame("x").assign(y=y.mean(axis=1), low=y.min(axis=1), high=y.max(axis=1)).dropna()


def _corrections(table: Table) -> _Panel:
    """A mark a cell, over what its staleness really was."""
    shares = {"is_ess_mean": ("effective sample size", "o"), "clip_ratio_mean": ("clipped", "^")}
    lines = [(_pairs(table.cells, "staleness_mean", number),
              {**_MARK, "alpha": 0.7, "label": label, "marker": marker, "color": colour})
             for (number, (label, marker)), colour in zip(shares.items(), COLOURS, strict=False)]  # fmt: skip

    def finish(axes: Any) -> None:
        axes.set_ylim(-0.03, 1.03)
        axes.legend(fontsize="x-small", frameon=False)

    words = "Effective and clipped tokens by staleness\na mark a run"
    return _Panel(words, "mean staleness of the run [learner steps]", "share of tokens", lines, finish)


def _to_sampler(table: Table, settings: Sequence[PlottedSetting]) -> _Panel:
    names, look = ("kl_behaviour_mean", "held_out_reward_end"), {**_MARK, "markersize": 6}
    lines = [(_pairs(table.cells.loc[each.runs], *names), {**each.look, **look}) for each in settings]
    words = "Held-out reward over KL to the sampling policy\na mark a run; KL is a mean over steps"
    return _Panel(words, "KL(sampler, learner) [nats a token]", "held-out reward, end", lines, _widen)


def _pairs(cells: Frame, *names: str) -> Frame:
    """Both numbers of each cell that has both."""
    return cells[[*names]].set_axis(["x", "y"], axis=1).dropna()


def _cost(table: Table, settings: Sequence[PlottedSetting], over: str, goal: float) -> _Panel:
    spent = reached(table, goal)[over]
    lines = [(spent[each.runs].dropna().to_frame("x").assign(y=row), {**each.look, **_MARK, "marker": "o"})
             for row, each in enumerate(settings)]  # fmt: skip

    def finish(axes: Any) -> None:
        for row, ((points, _), setting) in enumerate(zip(lines, settings, strict=True)):
            _beside(axes, row, f"{len(points)} of {len(setting.runs)}", "x-small")
        axes.set_yticks(range(len(settings)), [setting.row for setting in settings], fontsize="x-small")
        axes.set_ylim(len(settings) - 0.4, -0.6)
        axes.set_xlim(left=0)

    words = f"{over.capitalize()} to the target of {goal:.3f}\na mark a run; on the right how many reached it"
    return _Panel(words, _COSTS[over], "", lines, finish)


def _beside(axes: Any, row: int, words: str, size: str) -> None:
    """Write on the right of a row."""
    axes.annotate(words, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=size)


def _widen(axes: Any, axis: str = "y") -> None:
    """An axis of rewards, x or y, so that it is no finer than chance."""
    low, high = getattr(axes, f"get_{axis}lim")()
    margin = max(0.0, (_FINEST_SCALE - (high - low)) / 2)
    getattr(axes, f"set_{axis}lim")(low - margin, high + margin)
