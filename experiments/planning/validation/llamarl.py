"""V12: LlamaRL, generators and trainers in layouts of their own, beside one that generates in the layout of training."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.devices import device
from async_rlhf.plan.stages import Place

_SPREAD = 0.7  # of log lengths: the planner's own
_SHARES = 4  # the devices are divided in so many parts


@cache
def _steps_s(name: str, devices: int, mean: float, rows: int) -> tuple[float, float]:
    """In turns in one layout, and apart, by the best division of the devices."""
    table = data.published(12)
    place = Place(model=data.model(name), device=device("H100"), efficiency=calls.efficiency())
    completions = calls.lengths(rows, mean, _SPREAD, table["longest"])
    tokens, prompt = round(table["prompt"] + mean), table["prompt"]
    layout = calls.best_training(place, devices, rows, tokens, updates=table["updates"])
    if layout is None:
        return math.inf, math.inf
    kept = layout.model.training_bytes(1, layout.data) / (layout.tensor * layout.pipeline) - layout.model.weight_bytes / (
        layout.tensor * layout.pipeline
    )
    in_turns = calls.trained_s(layout, rows, tokens, updates=table["updates"]) + calls.generation_s(
        layout, completions, prompt, kept_bytes=kept
    )
    apart = min(
        max(
            calls.best_generation_s(place, part * devices // _SHARES, completions, prompt),
            calls.best_training_s(place, devices - part * devices // _SHARES, rows, tokens, updates=table["updates"]),
        )
        for part in range(1, _SHARES)
    )
    return in_turns, apart


def row() -> Row:
    table, figures = data.published(12), []
    for name, gain, nodes in zip(table["models"], table["gain"], table["nodes"], strict=True):
        steps = [
            _steps_s(name, int(factor * nodes * calls.NODE), mean, int(rows))
            for factor, mean, rows in data.trials(12, "devices", "mean", "rows")
        ]
        gains = [slow / fast for slow, fast in steps if math.isfinite(slow) and math.isfinite(fast)]
        figures.append(
            Figure(
                group="gain",
                label=f"{name} on {nodes * calls.NODE}",
                unit="",
                published=gain,
                predicted=steps[0][0] / steps[0][1],
                span=(min(gains), max(gains)),
            )
        )
    rises = all(earlier.predicted < later.predicted for earlier, later in pairwise(figures))
    found = ", ".join(f"{figure.predicted:.2f}" for figure in figures)
    return data.row(12, figures, holds=rises, finding=f"gains {found}, with the planner's own efficiencies")
