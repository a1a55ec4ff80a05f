"""The curves of runs in one picture: a panel for each quantity, a colour for each run.

Drawn from `metrics.jsonl` and `evaluations.jsonl`, of live runs too, of a long one from steps at even distances; with an
upright line where something was changed while a run went on. Needs matplotlib (the extra `plot`), only to draw. A panel that no
run has numbers for is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_files import figures, is_number, is_step

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colour-blind safe palette of Okabe and Ito, without the yellow, which is too pale for a line."""
_FORMATS = (".png", ".svg")
_COLUMNS = 3
_STYLES: Sequence[Any] = ("-", ":", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
# A line of more points than this has no more to see, and is slow to draw.
_MOST_POINTS = 2000
# Of several runs the first is drawn widest and the last on top, so that one that another coincides with shows beside it.
_WIDEST, _WIDTH, _NARROWEST = 3.0, 1.5, 1.2
# With more steps than this the numbers of single steps are drawn pale, and their mean over neighbours on top of them.
_SMOOTH_FROM = 40
_EXTREMES = ("max", "longest", "largest")  # of a step; a mean of them means nothing


@dataclass(frozen=True)
class MetricPanel:
    """One panel: metrics by their name in the legend, each with a line style of its own."""

    title: str
    metrics: dict[str, str] = field(default_factory=dict)
    noisy: bool = False
    """Whether single steps say little, so that a mean over neighbours is drawn too."""
    floor: float | None = None
    """The highest lower end of the scale."""
    ceiling: float | None = None
    """The lowest upper end of the scale."""


PANELS = (
    MetricPanel("Training reward", {"mean": "reward"}, noisy=True),
    MetricPanel("Staleness [steps]", {"mean": "staleness/mean", "max": "staleness/max"}, floor=0.0),
    MetricPanel(
        "Completion length [tokens]", {"mean": "completions/mean_length", "longest": "completions/max_length"}, floor=0.0
    ),
    MetricPanel("KL divergence", {"to the sampling policy": "kl/behaviour", "to the reference": "kl/reference"}, noisy=True),
    MetricPanel("Entropy [nats a token]", {"entropy": "entropy"}, noisy=True, floor=0.0),
    MetricPanel("Ratio proximal / behaviour", {"99 %": "is/ratio_q99", "1 %": "is/ratio_q01", "largest": "is/ratio_max"}),
    MetricPanel("Shares of tokens", {"clipped": "clip_ratio/region_mean", "effective": "is/ess"}, floor=0.0, ceiling=1.0),
    MetricPanel("Idle share of time", {"learner": "idle/learner", "actors": "idle/actor"}, noisy=True, floor=0.0, ceiling=1.0),
)


@dataclass(frozen=True)
class Curves:
    """The curves of one run."""

    name: str
    steps: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    changes: Sequence[int] = ()
    """The steps from which on something was changed."""


_Lines = Mapping[str, Sequence[tuple[int, float]]]
"""The points of a line, by label."""


@dataclass(frozen=True)
class _Pen:
    """How the lines of a run look."""

    colour: Any
    width: float
    """In points."""


def draw(readings: Sequence[Reading], out: Path) -> None:
    """Write the picture of these runs as PNG or SVG.

    Raises ConfigError for another format, without matplotlib, and when no run has done a step.
    """
    if out.suffix not in _FORMATS:
        raise ConfigError(f"--out {str(out)!r}: the name of a picture must end in {' or '.join(_FORMATS)}")
    runs = [reading.run for reading in readings]
    drawn = [
        Curves(name, reading.steps.drawn(), reading.run.read_evaluations(), reading.changed())
        for name, reading in zip(_names([run.path for run in runs]), readings, strict=True)
    ]
    if not any(curves.steps for curves in drawn):
        raise ConfigError(f"{', '.join(str(run.path) for run in runs)}: no step is recorded, so there is nothing to draw")
    try:
        picture(drawn).savefig(out)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError("a picture needs matplotlib: pip install 'async-rlhf[plot]'") from error
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be written: {error}") from error


def picture(runs: Sequence[Curves], title: str | None = None) -> Any:
    """A matplotlib figure. title: above it, instead of the names of the runs."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    palette = COLOURS if len(runs) <= len(COLOURS) else [colormaps["tab20"](i) for i in range(20)]
    pens = [_Pen(palette[i % len(palette)], width) for i, width in enumerate(_widths(len(runs)))]
    panels = [
        panel
        for panel in PANELS
        if any(any(True for _ in points(run.steps, m)) for run in runs for m in panel.metrics.values())
    ]
    judged = [_judged(run) for run in runs]
    titles = list(dict.fromkeys(title for each in judged for title in each))
    num_panels = len(panels) + len(titles)
    rows = -(-num_panels // _COLUMNS)
    figure = Figure(figsize=(4.6 * _COLUMNS, 2.9 * rows + 0.7), dpi=120, layout="constrained")
    axes = list(figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True).flat)
    for spare in axes[num_panels:]:
        spare.remove()
    for lowest in axes[max(0, num_panels - _COLUMNS) : num_panels]:
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("learner step", fontsize="small")
    for name in titles:
        _draw(axes.pop(0), MetricPanel(name), [each.get(name, {}) for each in judged], pens, dots=True)
    for panel, place in zip(panels, axes, strict=False):
        curves = [{label: list(points(run.steps, name)) for label, name in panel.metrics.items()} for run in runs]
        _draw(place, panel, curves, pens, smooth=max(len(run.steps) for run in runs) >= _SMOOTH_FROM)
    last = max((step for run in runs for step, _ in points(run.steps, "step")), default=1)
    for place in figure.axes:
        for run, pen in zip(runs, pens, strict=True):
            for step in run.changes:
                place.axvline(step, color=pen.colour, linewidth=0.8, linestyle=":", alpha=0.7)
        place.set_xlim(-0.03 * last, 1.03 * last)
    if title is not None:
        figure.suptitle(title, fontsize="medium", wrap=True)
        return figure
    handles = [_line(pen, "-", run.name) for run, pen in zip(runs, pens, strict=True)]
    if any(run.changes for run in runs):
        handles.append(_line(_Pen("0.3", 0.8), ":", "a setting was changed"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5), frameon=False)
    return figure


def _widths(num_runs: int) -> list[float]:
    """Widths of the runs' lines, falling."""
    if num_runs == 1:
        return [_WIDTH]
    return [_WIDEST - i * (_WIDEST - _NARROWEST) / (num_runs - 1) for i in range(num_runs)]


def points(records: Iterable[dict[str, Any]], name: str) -> Iterator[tuple[int, float]]:
    """Step and value of each record that has a finite number of this name."""
    for record in records:
        step, value = record.get("step"), record.get(name)
        if type(step) is int and is_number(value):
            yield step, float(value)


def _draw(
    axes: Any, panel: MetricPanel, curves: Sequence[_Lines], pens: Sequence[_Pen], *, smooth: bool = False, dots: bool = False
) -> None:
    """Scale, title, whole steps, a line style for each label, and a legend of them where there is more than one.

    curves: of each run. dots: single points, joined.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = dict(zip(dict.fromkeys(name for lines in curves for name in lines if lines[name]), cycle(_STYLES), strict=False))
    for lines, pen in zip(curves, pens, strict=True):
        for label, line in lines.items():
            if line:
                _draw_line(axes, line, pen, drawn[label], smooth=smooth and label not in _EXTREMES, dots=dots)
    alone = len(drawn) == 1 and len(panel.metrics) != 1  # then no legend names it
    axes.set_title(f"{panel.title}, {next(iter(drawn))}" if alone else panel.title, fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize="small")
    tidy(axes)
    low, high = axes.get_ylim()
    axes.set_ylim(low if panel.floor is None else panel.floor, high if panel.ceiling is None else max(high, panel.ceiling))
    if len(drawn) > 1:
        handles = [_line(_Pen("0.3", _WIDTH), style, label) for label, style in drawn.items()]
        axes.legend(handles=handles, loc="best", fontsize="x-small", frameon=True, framealpha=0.7, edgecolor="none")


def tidy(axes: Any, grid: Any = "y") -> None:
    """Two spines, and pale lines behind the data. grid: of which axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)


def _draw_line(axes: Any, line: Sequence[tuple[int, float]], pen: _Pen, style: Any, *, smooth: bool, dots: bool) -> None:
    steps, values = [step for step, _ in line], [value for _, value in line]
    every = 1 if dots else -(-len(line) // _MOST_POINTS)
    if smooth:
        axes.plot(steps[::every], values[::every], color=pen.colour, linewidth=0.7, alpha=0.3)
        values = _smoothed(values)
    marker = "o" if dots or len(line) == 1 else None
    width = pen.width if dots or style == "-" else pen.width / 2
    look = {"color": pen.colour, "linewidth": width, "marker": marker, "markersize": 2 + width}
    axes.plot(steps[::every], values[::every], linestyle=style, **look)


_PANELS = {"rewards": "Held-out rewards, each", "reward": "Held-out reward, each source"}


def _judged(run: Curves) -> dict[str, _Lines]:
    """By panel and label, the results of evaluations at their steps; of pass@k the largest k."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for record in filter(is_step, run.evaluations):
        pass_at = (record.get("sampled") or {}).get("pass_at") or {}
        largest = {f"pass@{k}": pass_at[k] for k in sorted(pass_at, key=int)[-1:] if pass_at[k] is not None}
        for name, value in (figures(record) | largest).items():
            of_what, _, label = name.partition("/")
            panel = panels.setdefault(_PANELS[of_what] if label else "Held-out prompts", {})
            panel.setdefault(label or name, {})[record["step"]] = value
    return {title: {label: sorted(line.items()) for label, line in lines.items()} for title, lines in panels.items()}


def _line(pen: _Pen, style: Any, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=pen.colour, linewidth=pen.width, linestyle=style, label=label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a twentieth of all on either side."""
    reach = max(1, len(values) // 40)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest last parts of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]
