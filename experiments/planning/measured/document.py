"""What `docs/planning.md` says of the cells: made from the files that are kept beside this one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments import page
from async_rlhf.experiments.planning.measured import results
from async_rlhf.experiments.planning.measured.cells import CELLS, Cell, cell
from async_rlhf.experiments.planning.measured.results import Judged, Speed, judged

KEPT = Path(__file__).parent
RESULTS, PREDICTIONS, CONSTANTS = KEPT / "results.csv", KEPT / "predictions.csv", KEPT / "constants.json"
_UNITS = {"generation": "decoding and prefill", "completion": "work for each completion", "training": "a learner step",
          "publication": "weights", "scoring": "work of a reward"}  # fmt: skip


def parts(measured: Sequence[Speed], predicted: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, str]:
    """Name to Markdown. predicted: samples a second by cell. factors: of constants, by kind of stage."""
    found = judged(measured, predicted)
    return {
        "measured": _cells(measured, predicted, found),
        "measured-verdict": _verdict(measured, predicted, found, factors),
        "measured-strategies": _strategies(measured, predicted),
    }


def kept() -> dict[str, str]:
    """Of the files that are kept. Raises ConfigError where one is missing or is none."""
    return parts(results.speeds(results.read(RESULTS)), results.read_predictions(PREDICTIONS), read_factors(CONSTANTS))


def read_factors(path: Path) -> dict[str, float]:
    """Raises ConfigError."""
    try:
        return {str(name): float(value) for name, value in json.loads(path.read_text())["factors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no constants that `predict` has written: {error}") from error


def _cells(measured: Sequence[Speed], predicted: Mapping[str, float], found: Judged) -> str:
    columns = [
        "cell",
        "load",
        "strategy",
        "max_staleness",
        "actors",
        "for",
        "measured (lowest to highest), samples/s",
        "spread",
    ]
    lines = []
    for speed in measured:
        about = cell(speed.cell)
        line = [speed.cell, about.load, about.strategy or "", str(about.max_staleness), str(about.actors), speed.use]
        line += [f"{speed.median:.0f} ({speed.low:.0f} to {speed.high:.0f})", f"{speed.spread:.0%}"]
        error = found.errors[speed.cell]
        lines.append(
            [*line, f"{predicted[speed.cell]:.0f}", f"{100 * error:+.1f} %", "yes" if abs(error) <= speed.spread else "no"]
        )
    return page.raw_table([*columns, "predicted", "error", "within the spread"], lines)


def _verdict(measured: Sequence[Speed], predicted: Mapping[str, float], found: Judged, factors: Mapping[str, float]) -> str:
    said = []
    for use in ("fit", "held out"):
        own = [speed for speed in measured if speed.use == use]
        errors = [abs(found.errors[speed.cell]) for speed in own]
        inside = sum(abs(found.errors[speed.cell]) <= speed.spread for speed in own)
        between = sum(speed.low <= predicted[speed.cell] <= speed.high for speed in own)
        said.append(
            f"{_NAMES[use]}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}; {inside} of {len(own)} "
            f"errors are no larger than the spread of the runs ({statistics.median(speed.spread for speed in own):.0%} in the "
            f"median); predictions between the slowest and the fastest run: {between}."
        )
    right, pairs = results.ordered([speed for speed in measured if speed.use == "held out"], predicted)
    mixed = f"{found.right} of all {found.pairs} such pairs"
    said.append(
        f"Of two held-out cells whose runs do not overlap, the faster one is predicted to be faster in {right} of {pairs} "
        f"pairs; in {mixed}."
    )
    scaled = ", ".join(f"{_UNITS[kind]} {factor:.2f}" for kind, factor in factors.items())
    said.append(f"The fit multiplied the constants of `calibrate` by: {scaled}.")
    return "\n".join(f"- {line}" for line in said)


_NAMES = {"fit": "Six cells that constants were fitted on", "held out": "Six cells that were held out"}


def _strategies(measured: Sequence[Speed], predicted: Mapping[str, float]) -> str:
    """Of each load the strategies, the fastest first, as measured and as predicted."""
    medians = {speed.cell: speed.median for speed in measured}

    def shown(cells: Sequence[Cell], speeds: Mapping[str, float]) -> str:
        ordered = sorted(cells, key=lambda each: -speeds[each.name])
        return ", ".join(f"{each.strategy} {speeds[each.name]:.0f}" for each in ordered)

    placed = [each for each in CELLS if each.strategy is not None and each.name in medians]
    lines = []
    for load, group in groupby(placed, key=lambda each: each.load):
        cells = list(group)
        lines.append([load, shown(cells, medians), shown(cells, predicted)])
    return page.raw_table(["load", "measured, the fastest first, samples/s", "predicted"], lines)
