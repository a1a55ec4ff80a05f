"""The second picture of a sweep: what reward cost in samples and tokens, what corrections did, how far the policy moved.

Panels for which no cell kept a number are left out. Needs matplotlib (the extra `experiments`). Called by `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from async_rlhf.experiments.page import tidy
from async_rlhf.experiments.staleness.cells import CellResult, finished
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.staleness.outcomes import BLOCK, SMOOTHED, Reached, path, reached, scores_apart, smoothed, target
from async_rlhf.experiments.staleness.plot import FINEST_SCALE, Setting, settings_of, title
from async_rlhf.inspect.plot import COLOURS

_LEGEND_COLUMNS = 4
_MOST_TICKS = 5
Settings = Sequence[Setting]
Draw = Callable[[Any, Settings], None]
# The places of the steps, and a number of each.
_Course = tuple[Sequence[float], Sequence[float | None]]
_LENGTH = "completions/mean_length"
_SAMPLES = "completions trained on"


@dataclass(frozen=True)
class _Block:
    """Panels side by side, in as many rows as they need. shared: they have the same axes (`x` too, or `y` alone), and the
    labels of y stand beside the first. height: of a row, in inches."""

    panels: Sequence[Draw]
    columns: int
    height: float = 3.7
    shared: str = ""


def picture(results: Sequence[CellResult], sweep: SweepConfig, command: str = "") -> Figure:
    """A panel for each quantity that was kept, in the colours of the first picture; dashes and marks are its columns."""
    settings = settings_of(finished(results))
    blocks = [block for block in _blocks(finished(results), settings) if block.panels]
    heights = [block.height * -(-len(block.panels) // block.columns) for block in blocks]
    below = 0.18 * -(-sum(1 + setting.row.count("\n") for setting in settings) // _LEGEND_COLUMNS)
    figure = Figure(figsize=(14.5, sum(heights) + below + 1.0), dpi=110, layout="constrained")
    parts: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    for block, part in zip(blocks, parts[:, 0], strict=True):
        _draw_block(part, block, settings)
    handles = [
        Line2D([], [], color=setting.colour, linestyle=setting.style, marker=setting.marker, markersize=4, label=setting.row)
        for setting in settings
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=_LEGEND_COLUMNS, handlelength=4, frameon=False, fontsize="small"
    )
    figure.suptitle(title(results, sweep, command), wrap=True, fontsize="medium")
    return figure


def _draw_block(part: Any, block: _Block, settings: Settings) -> None:
    rows = -(-len(block.panels) // block.columns)
    sharey, sharex = bool(block.shared), block.shared == "x"
    places = list(part.subplots(rows, block.columns, squeeze=False, sharex=sharex, sharey=sharey).flat)
    for spare in places[len(block.panels) :]:
        spare.remove()
    for draw, axes in zip(block.panels, places, strict=False):
        draw(axes, settings)
        tidy(axes, grid="both")
        axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axes.title.set_fontsize("medium")
        if block.shared:
            axes.label_outer()
    if block.shared == "x":
        _widen(places[0])


def _blocks(results: Sequence[CellResult], settings: Settings) -> list[_Block]:
    """Those that no cell has numbers for are empty. Divergences from the reference have a panel for each column."""
    goal = target(results)
    value = None if goal is None else goal.value
    columns = list(dict.fromkeys(setting.column for setting in settings))
    scores = [name for name in scores_apart(results) or [""] if any(_to_reference(cell, name) for cell in results)]
    paths = [[_over_reference(name, column) for column in columns] for name in scores]
    panels = _panels(results, value)
    if len(columns) == 1:
        panels, paths = panels + [panel for each in paths for panel in each], []
    reached_by_any = value is not None and any(reached(cell, value) is not None for cell in results)
    costs = [
        _cost("Samples to the target", _SAMPLES, lambda found: found.samples, value),
        _cost("Seconds to the target", "training time [s]", lambda found: found.seconds, value),
    ]
    row = 0.1 + 0.11 * (1 + settings[0].row.count("\n"))
    return [
        _Block(panels, 2 if len(panels) == 4 else 3),
        *(_Block(each, min(3, len(each)), shared="x") for each in paths),
        _Block(costs if reached_by_any else [], 2, height=1.3 + row * len(settings), shared="y"),
    ]


def _panels(results: Sequence[CellResult], goal: float | None) -> list[Draw]:
    # of one's own age everything is known: all tokens are effective, and the divergence is the engine's arithmetic
    stale = [cell for cell in results if cell.staleness_mean > 0]
    judged = [cell for cell in stale if cell.held_out_end.reward is not None and cell.kl_behaviour_mean is not None]
    panels: list[tuple[Draw, bool]] = [
        (_over("samples", _SAMPLES, lambda cell: cell.samples, goal), True),
        (
            _over("tokens", "tokens trained on", lambda cell: cell.tokens or (), goal),
            any(cell.tokens is not None for cell in results),
        ),
        (_over("seconds", "training time [s]", lambda cell: cell.seconds, goal), True),
        (_draw_lengths, any(_LENGTH in cell.curves for cell in results)),
        (_draw_corrections, any(cell.is_ess_mean is not None for cell in stale)),
        (_draw_to_sampler, bool(judged)),
    ]
    return [draw for draw, is_known in panels if is_known]


def _over(what: str, label: str, places: Callable[[CellResult], Sequence[float]], goal: float | None) -> Draw:
    def draw(axes: Any, settings: Settings) -> None:
        _draw_courses(axes, settings, f"Training reward over {what}", label, lambda cell: (places(cell), smoothed(cell)))
        axes.set_ylabel("mean reward")
        if goal is not None:
            axes.axhline(goal, color="0.4", linewidth=0.8, linestyle=":")
            box = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "linewidth": 0}
            # curves begin low: the left is free
            axes.annotate(f"target {goal:.2f}", (0.01, goal), xycoords=("axes fraction", "data"), va="bottom",
                          fontsize="x-small", color="0.3", bbox=box)  # fmt: skip

    return draw


def _draw_lengths(axes: Any, settings: Settings) -> None:
    _draw_courses(axes, settings, "Completion length over samples", _SAMPLES, lambda c: (c.samples, smoothed(c, _LENGTH)))
    axes.set_ylabel("mean length [tokens]")


def _draw_courses(axes: Any, settings: Settings, title: str, label: str, course: Callable[[CellResult], _Course]) -> None:
    for setting in settings:
        courses = [found for found in map(course, setting.cells) if all(found)]
        # a step of every seed, at the mean of their places
        steps = [(xs, ys) for xs, ys in _step_by_step(courses) if all(y is not None for y in ys)]
        xs, ys = [sum(x) / len(x) for x, _ in steps], [sum(y) / len(y) for _, y in steps]
        axes.plot(xs, ys, linestyle=setting.style, color=setting.colour, linewidth=1.3)
    axes.set_xlim(left=0)
    axes.set(title=f"{title}\nmean of the seeds and of {SMOOTHED} completions", xlabel=label)


def _step_by_step(cells: Sequence[_Course]) -> list[tuple[list[float], list[Any]]]:
    by_place = zip(*(xs for xs, _ in cells), strict=False)
    by_reward = zip(*(ys for _, ys in cells), strict=False)
    return [(list(xs), list(ys)) for xs, ys in zip(by_place, by_reward, strict=False)]


def _draw_corrections(axes: Any, settings: Settings) -> None:
    """A mark a cell, over what its staleness really was."""
    measures = (
        ("effective sample size", "o", COLOURS[0], "is_ess_mean"),
        ("clipped", "^", COLOURS[1], "clip_ratio_mean"),
    )
    for name, marker, colour, number in measures:
        known = [(c.staleness_mean, y) for s in settings for c in s.cells if (y := getattr(c, number)) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color=colour, label=name, alpha=0.7, markersize=5)
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize="x-small", frameon=False)
    axes.set(
        title="Effective and clipped tokens by staleness\na mark a run",
        xlabel="mean staleness of the run [learner steps]",
        ylabel="share of tokens",
    )


def _draw_to_sampler(axes: Any, settings: Settings) -> None:
    for setting in settings:
        known = [(c.kl_behaviour_mean, c.held_out_end.reward) for c in setting.cells if c.held_out_end.reward is not None]
        points = [(kl, reward) for kl, reward in known if kl is not None]
        if points:
            axes.plot(*zip(*points, strict=True), setting.marker, color=setting.colour, markersize=6, alpha=0.85)
    _widen(axes)
    axes.set(
        title="Held-out reward over KL to the sampling policy\na mark a run; KL is a mean over steps",
        xlabel="KL(sampler, learner) [nats a token]",
        ylabel="held-out reward, end",
    )


def _over_reference(name: str, column: str) -> Draw:
    """Of one reward function, of their sum where the name is empty; the settings of one column."""

    def draw(axes: Any, settings: Settings) -> None:
        for setting in (each for each in settings if each.column == column):
            # a place along training of every seed, at their mean
            places = list(zip(*filter(None, (_to_reference(cell, name) for cell in setting.cells)), strict=False))
            kls = [sum(kl for kl, _ in place) / len(place) for place in places]
            scores = [sum(score for _, score in place) / len(place) for place in places]
            look: dict[str, Any] = {"linestyle": setting.style, "marker": setting.marker, "color": setting.colour}
            axes.plot(kls, scores, **look, markersize=4, linewidth=1, alpha=0.85)
        if not column:
            _widen(axes)
        what, where = name or "reward", column and f"{column}; "
        axes.set(
            title=f"Training {what} over KL to the reference\n{where}a mark: {BLOCK} completions of each seed",
            xlabel="KL(policy that sampled, reference) [nats a token]",
            ylabel=f"mean {what}",
        )

    return draw


def _widen(axes: Any) -> None:
    low, high = axes.get_ylim()
    margin = max(0.0, (FINEST_SCALE - (high - low)) / 2)
    axes.set_ylim(low - margin, high + margin)


def _to_reference(cell: CellResult, name: str) -> list[tuple[float, float]]:
    return [(point.kl, point.score) for point in path(cell, name) if point.kl is not None]


def _cost(words: str, label: str, number: Callable[[Reached], float], goal: float | None) -> Draw:
    def draw(axes: Any, settings: Settings) -> None:
        for row, setting in enumerate(settings):
            runs = [reached(cell, goal) for cell in setting.cells] if goal is not None else []
            known = [number(run) for run in runs if run is not None]
            axes.plot(known, [row] * len(known), "o", color=setting.colour, markersize=5, alpha=0.85)
            axes.annotate(f"{len(known)} of {len(runs)}", (1.01, row), xycoords=("axes fraction", "data"), va="center",
                          fontsize="x-small")  # fmt: skip
        axes.set_yticks(range(len(settings)), [setting.row for setting in settings], fontsize="x-small")
        axes.set_ylim(len(settings) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set(title=f"{words} of {goal:.3f}\na mark a run; on the right how many reached it", xlabel=label)

    return draw
