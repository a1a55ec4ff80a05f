"""A plan as a picture: when each set of devices works on which batch, and speed against staleness. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.schedules import AROUND, Stage
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.search import Found
from async_rlhf.inspect.plot import COLOURS

_FORMATS = (".png", ".svg")
_STEPS = 4
_STAGES: tuple[Stage, ...] = ("generate", "score", "train", "publish", "adopt", "switch")


def check_format(path: Path) -> None:
    """Raises ConfigError for another format than PNG or SVG, and where matplotlib is missing."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"a picture is written as {' or '.join(_FORMATS)}, not {path.suffix or path.name!r}")
    if find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'async-rlhf[plot]'")


def draw(found: Found, path: Path) -> None:
    """Raises ConfigError as `check_format`."""
    check_format(path)
    from matplotlib.figure import Figure

    plan = found.best or found.fastest
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    lanes, trade = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_lanes(lanes, plan)
    _draw_trade(trade, found)
    figure.savefig(path, dpi=150)


def bars(plan: Plan) -> Iterator[tuple[str, Stage, float, float]]:
    """Lane, stage, begin and seconds over some steps of the steady state, where each lane repeats itself every step.

    A lane begins each step with the first of its stages; what it waits for is where it is idle.
    """
    period = plan.step.seconds
    for circuit in plan.step.circuits:
        if circuit.name == AROUND and len(plan.step.circuits) > 1:
            continue
        for step in range(_STEPS):
            begin = step * period
            for stage, seconds in circuit.stages:
                yield circuit.name, stage, begin, seconds
                begin += seconds


def _draw_lanes(axes: Any, plan: Plan) -> None:
    drawn = list(bars(plan))
    names = list(dict.fromkeys(lane for lane, *_ in drawn))
    for stage in _STAGES:
        own = [(lane, begin, seconds) for lane, each, begin, seconds in drawn if each == stage and seconds > 0]
        if own:
            axes.barh(
                [names.index(lane) for lane, *_ in own],
                [seconds for *_, seconds in own],
                left=[begin for _, begin, _ in own],
                height=0.6,
                color=COLOURS[_STAGES.index(stage)],
                edgecolor="white",
                linewidth=0.8,
                label=f"{stage} {max(seconds for *_, seconds in own):.3g} s",
            )
    devices = {filled.set.name: f"{filled.set.name}\n{filled.set.devices} devices" for filled in plan.filled}
    axes.set_yticks(range(len(names)), [devices.get(name, name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, _STEPS * plan.step.seconds)
    axes.set_xlabel("Seconds, four steps of the steady state (white: idle)")
    axes.set_title(f"{plan.candidate.strategy}: {plan.step.seconds:.3g} s a step", loc="left", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=6, frameon=False, fontsize=8)


def _draw_trade(axes: Any, found: Found) -> None:
    for number, (label, plans) in enumerate((("any strategy", found.by_bound), ("runs here", found.here_by_bound))):
        points = [(bound, plan.samples_per_s) for bound, plan in plans.items() if not math.isinf(bound)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="os"[number], color=COLOURS[number], label=label, ls="-:"[number])
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted(bound for bound in {*found.by_bound, *found.here_by_bound} if not math.isinf(bound)))
    axes.set_xlabel("max_staleness [steps]")
    axes.set_ylabel("Samples/s")
    axes.set_title("Speed against staleness", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
