"""The picture of a sweep: learning over steps and over seconds, the outcome, and the staleness that was really there.

Where two keys are swept, learning has a column for each value of the first and a colour for each value of the second.
Needs matplotlib (the extra `experiments`). Called by `report`; `trade_offs` draws what else was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from async_rlhf.experiments.staleness.cells import CellResult
from async_rlhf.experiments.staleness.config import SweepConfig, shown
from async_rlhf.experiments.staleness.outcomes import by_setting
from async_rlhf.experiments.statistics import MIN_SEEDS, estimate
from async_rlhf.inspect.plot import COLOURS, tidy

# More columns than this leave no room for a number in each cell of the last panel.
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
_CURVE = "line: mean of the seeds\nband: lowest to highest"


@dataclass(frozen=True)
class Setting:
    """The runs of one setting: the column and the name of their curve, the name of their row, their colour, and with it
    the dashes and the marker that tell it from others of that colour, in the words of matplotlib's `plot`."""

    cells: list[CellResult]
    column: str
    curve: str
    row: str
    look: dict[str, Any]

    @property
    def colour(self) -> Any:
        return self.look["color"]

    @property
    def points(self) -> list[tuple[int, float, list[float]]]:
        """Step, the seconds that it ended after (mean over seeds), and the rewards of the seeds, where there are any."""
        seconds = zip(*(cell.seconds for cell in self.cells), strict=False)
        rewards = zip(*(cell.rewards for cell in self.cells), strict=False)
        steps = enumerate(zip(seconds, rewards, strict=True), 1)
        found = [(step, sum(s) / len(s), [each for each in r if each is not None]) for step, (s, r) in steps]
        return [point for point in found if point[2]]


def picture(results: Sequence[CellResult], sweep: SweepConfig, command: str = "") -> Figure:
    """Above, learning; below, a row for each setting with its outcome and its ages, in the order of the sweep."""
    settings = settings_of(results)
    columns = list(dict.fromkeys(setting.column for setting in settings))
    legend_lines = sum(1 + curve.count("\n") for curve in {setting.curve for setting in settings})
    learning, row = max(4.0 if len(columns) == 1 else 6.0, 1.2 + 0.2 * legend_lines), 0.2 + 0.16 * len(sweep.levels)
    heights = [learning, 1.3 + row * len(settings)]
    size = (max(13.0, 3.4 * len(columns)), sum(heights) + 0.7)
    figure = Figure(figsize=size, dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    _draw_learning(halves[0], settings, columns)
    outcome, ages = halves[1].subplots(1, 2, width_ratios=[1, 1.2], sharey=True)
    _draw_ages(ages, settings)
    _draw_outcome(outcome, settings)
    outcome.set_yticks(range(len(settings)), [setting.row for setting in settings])
    for axes in figure.axes:
        axes.title.set_fontsize("medium")
    figure.suptitle(title(results, sweep, command), wrap=True)
    return figure


def title(results: Sequence[CellResult], sweep: SweepConfig, command: str) -> str:
    """The question, what was run, and the command that made it."""
    seeds = f"{len(sweep.seeds)} seed{'s' if len(sweep.seeds) > 1 else ''}"
    budget = f"{results[0].trained_samples:,} samples trained on per run"
    details = f"{sweep.name}: {sweep.grid}; {seeds}, {budget}"
    return "\n".join([sweep.question, details, *([command] if command else [])])


def settings_of(results: Sequence[CellResult]) -> list[Setting]:
    """Every setting with its names and its colour."""
    groups = by_setting(results)
    places = range(len(results[0].setting))
    # a key with one value among the results, as in a sweep that is not finished, tells nothing apart
    varied = [i for i in places if len({result.setting[i][1] for result in results}) > 1] or [places[-1]]
    by_column = len(varied) == 2
    curves = {label: shown(cells[0].setting[i] for i in varied[by_column:]) for label, cells in groups.items()}
    # The value behind each curve: a setting of three keys has none, its name is a word.
    values = {curves[label]: cells[0].setting[varied[-1]][1] if len(varied) <= 2 else label for label, cells in groups.items()}
    colours = dict(zip(values, _colours(list(values.values())), strict=True))
    columns = {label: shown([cells[0].setting[varied[0]]]) if by_column else "" for label, cells in groups.items()}
    order = list(dict.fromkeys(columns.values()))
    settings = []
    for number, (label, cells) in enumerate(groups.items()):
        style, marker = _LOOKS[order.index(columns[label]) % len(_LOOKS)]
        if not by_column and number % 2 and len(groups) > _MOST_SOLID:
            style = "--"
        curve, row = curves[label].replace(", ", "\n"), label.replace(", ", "\n")
        look = {"color": colours[curves[label]], "linestyle": style, "marker": marker}
        settings.append(Setting(cells, columns[label], curve, row, look))
    return settings


def _colours(values: Sequence[Any]) -> list[Any]:
    """Words have distinct colours, numbers a scale; readers who see few colours can tell both apart."""
    if any(isinstance(value, str) for value in values) and len(values) <= len(COLOURS):
        return list(COLOURS[: len(values)])
    # The yellow end of the scale is not readable on white.
    scale = matplotlib.colormaps["viridis"].resampled(256)
    return [scale(0.8 * i / max(1, len(values) - 1)) for i in range(len(values))]


def _draw_learning(figure: Any, settings: Sequence[Setting], columns: Sequence[str]) -> None:
    """The same curves over learner steps and over seconds: side by side, or one above the other for each column."""
    num_rows = 1 if len(columns) == 1 else 2
    sharex: Any = "row" if num_rows == 2 else False
    panels = figure.subplots(num_rows, 2 * len(columns) // num_rows, sharex=sharex, sharey=True, squeeze=False)
    for i, column in enumerate(columns):
        over_steps, over_seconds = panels[0] if num_rows == 1 else panels[:, i]
        inside = [setting for setting in settings if setting.column == column]
        for j, setting in enumerate(inside):
            _draw_curve(over_steps, over_seconds, setting, "--" if j % 2 and len(inside) > _MOST_SOLID else "-")
        over_steps.xaxis.set_major_locator(MaxNLocator(integer=True))
        over_steps.set(title=column or "Training reward over steps", xlabel="learner step")
        over_seconds.set(xlabel="training time [s], mean of the seeds")
        if num_rows == 1:
            over_seconds.set_title("Training reward over time")
    for axes in panels.flat:
        axes.set_xlim(left=0)
        tidy(axes)
    for axes in panels[:, 0]:
        axes.set_ylabel("mean reward of the batch")
    names: dict[str, Any] = {}
    for axes in panels.flat:
        names |= {line.get_label(): line for line in axes.lines}
    title = _CURVE if any(len(setting.cells) > 1 for setting in settings) else None
    figure.legend(names.values(), names, loc="outside right upper", frameon=False, title=title, alignment="left")


def _draw_curve(over_steps: Any, over_seconds: Any, setting: Setting, style: str) -> None:
    """Reward of each step: mean over seeds, and the range of the seeds as a band."""
    points = setting.points
    means = [sum(rewards) / len(rewards) for *_, rewards in points]
    low, high = [min(rewards) for *_, rewards in points], [max(rewards) for *_, rewards in points]
    for axes, places in ((over_steps, [step for step, *_ in points]), (over_seconds, [seconds for _, seconds, _ in points])):
        axes.plot(places, means, style, color=setting.colour, label=setting.curve)
        axes.fill_between(places, low, high, color=setting.colour, alpha=0.13, linewidth=0)


def _draw_outcome(axes: Any, settings: Sequence[Setting]) -> None:
    """Held-out reward at the end: a point a seed, a line at the mean, its interval where there is one."""
    for row, setting in enumerate(settings):
        ends = [cell.held_out_end.reward for cell in setting.cells if cell.held_out_end.reward is not None]
        if (found := estimate(ends)) is None:
            axes.annotate("not measured", (0.5, row), xycoords=("axes fraction", "data"), ha="center", va="center")
            continue
        # Points with equal values stay visible one above the other.
        places = [row + 0.09 * (i - (len(ends) - 1) / 2) for i in range(len(ends))]
        axes.plot(ends, places, "o", color=setting.colour, markersize=5, alpha=0.85)
        axes.errorbar(found.mean, row, xerr=found.half_width, color=setting.colour, capsize=5, elinewidth=1.2)
        axes.vlines(found.mean, row - 0.32, row + 0.32, color=setting.colour, linewidth=2)
    before = estimate(cell.held_out_start.reward for setting in settings for cell in setting.cells)
    fewest = min(len(setting.cells) for setting in settings)
    marks = f"point: seed, line: mean{', bar: 95 % interval' if fewest >= MIN_SEEDS else '; too few seeds for an interval'}"
    axes.set(
        title=f"Held-out reward after training{'' if before is None else f' (before: {before.mean:.2f})'}\n{marks}",
        xlabel="mean reward, greedy",
    )
    widen(axes, "x")
    tidy(axes, grid="x")


def _draw_ages(axes: Any, settings: Sequence[Setting]) -> None:
    """Share of trained tokens by age, a row a setting, and the mean age beside it."""
    # of fresh data alone the panel would be one black field
    oldest = max(_FEWEST_AGES - 1, *(age for setting in settings for cell in setting.cells for age, _ in cell.staleness_tokens))
    shares = [_shares(setting.cells, oldest) for setting in settings]
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for row, (setting, ages) in enumerate(zip(settings, shares, strict=True)):
        for age, share in enumerate(ages):
            if share > 0 and oldest < _MOST_WRITTEN_AGES:
                text = "<1 %" if share < 0.005 else f"{share:.0%}".replace("%", " %")
                axes.text(age, row, text, ha="center", va="center", color="white" if share > 0.5 else "black", fontsize="small")
        mean = sum(cell.staleness_mean for cell in setting.cells) / len(setting.cells)
        axes.annotate(f"mean {mean:.2f}", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize="small")
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


def widen(axes: Any, axis: str = "y") -> None:
    """An axis of rewards, x or y, so that it is no finer than chance."""
    low, high = getattr(axes, f"get_{axis}lim")()
    margin = max(0.0, (_FINEST_SCALE - (high - low)) / 2)
    getattr(axes, f"set_{axis}lim")(low - margin, high + margin)
