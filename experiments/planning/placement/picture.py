"""A plan as a picture: when each set of devices works on which batch, and speed against staleness. Needs matplotlib."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.schedules import AROUND, STAGES
from async_rlhf.experiments.planning.placement.evaluation import Plan
from async_rlhf.experiments.planning.placement.search import Found
from async_rlhf.inspect.plot import COLOURS

_FORMATS = (".png", ".svg")
_STEPS = 4


def check_format(path: Path) -> None:
    """Raises ConfigError for another format than PNG or SVG, and where matplotlib is missing."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"a picture is written as {' or '.join(_FORMATS)}, not {path.suffix or path.name!r}")
    if find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'async-rlhf[plot]'")


def draw(found: Found, path: Path) -> None:
    """In a format that was checked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    lanes, trade = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_lanes(lanes, found.plan)
    _draw_trade(trade, found)
    figure.savefig(path, dpi=150)


def _draw_lanes(axes: Any, plan: Plan) -> None:
    """Some steps of the steady state, where each lane repeats itself every step: it begins each with the first of its stages,
    and what it waits for is where it is idle."""
    period = plan.step.seconds
    lanes = [circuit for circuit in plan.step.circuits if circuit.name != AROUND] or plan.step.circuits
    for stage in STAGES:
        most = 0.0
        for place, lane in enumerate(lanes):
            begin = 0.0
            for name, seconds in lane.stages:
                if name == stage and seconds > 0:
                    lefts = [begin + step * period for step in range(_STEPS)]
                    colour = COLOURS[STAGES.index(stage)]
                    axes.barh([place] * _STEPS, seconds, 0.6, lefts, color=colour, edgecolor="white", linewidth=0.8)
                    most = max(most, seconds)
                begin += seconds
        if most:
            axes.barh(0, 0, color=COLOURS[STAGES.index(stage)], label=f"{stage} {most:.3g} s")
    devices = {filled.set.name: f"{filled.set.name}\n{filled.set.devices} devices" for filled in plan.filled}
    axes.set_yticks(range(len(lanes)), [devices.get(lane.name, lane.name) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, _STEPS * period)
    axes.set_xlabel("Seconds, four steps of the steady state (white: idle)")
    axes.set_title(f"{plan.candidate.strategy.name}: {period:.3g} s a step", loc="left", fontsize=10)
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
