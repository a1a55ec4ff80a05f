"""The cells by simulation: constants of `async-rlhf calibrate`, refitted on the cells that are for fitting and on no other.

What a held-out cell is known by before it is run: its settings, the lengths of completions and prompts in cells with the same
limit, how long its reward takes alone, and the CPUs that its strategy gives to each part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.calibrate.of_run import workload_of
from async_rlhf.experiments.planning.measured.cells import CELLS, Cell
from async_rlhf.experiments.planning.measured.results import Row
from async_rlhf.launch.cpu_sets import PARTS, Part, cpu_sets
from async_rlhf.plan.costs import Costs
from async_rlhf.plan.refitting import Observed, Refitted, refit, slowed
from async_rlhf.plan.simulation import simulate
from async_rlhf.plan.workload import Pool, Role, Workload
from async_rlhf.run.config import load

_ROLES: Mapping[Part, Role] = {"generation": "actor", "scoring": "scoring", "learning": "learner"}
_QUANTILES = {"length_p50": 0.5, "length_p90": 0.9, "length_p99": 0.99, "length_max": 1.0}
COMPLETION_S = 2e-4
"""Where constants have none: about what an actor does for a completion besides (its text, its way to a worker process and
back, its record). Fitted with the others."""
_LENGTHS = 400  # that stand for a distribution


@dataclass(frozen=True)
class Predictions:
    """samples_per_s: by cell."""

    refitted: Refitted
    samples_per_s: Mapping[str, float]


def predict(
    rows: Sequence[Row], costs: Costs, *, num_cpus: int, rewards_s: Mapping[int, float], steps: int = 60
) -> Predictions:
    """rows: measurements, of which those of held-out cells are not looked at. num_cpus: of the machine. rewards_s: by rounds of
    work, seconds alone (`measure_rewards`).

    Raises ConfigError where cells for fitting have not been measured.
    """
    rows = [row for row in rows if row["use"] == "fit"]
    seen = {cell.name: [row for row in rows if row["cell"] == cell.name] for cell in CELLS if cell.use == "fit"}
    if lacking := [name for name, own in seen.items() if not own]:
        raise ConfigError(f"cells for fitting have not been measured: {', '.join(lacking)}")
    workloads = {cell.name: workload(cell, rows, num_cpus, rewards_s) for cell in CELLS}
    observed = [
        Observed(workloads[name], _median(own, "samples_per_s"), _median(own, "idle_learner")) for name, own in seen.items()
    ]
    costs = costs.model_copy(update={"completion_s": costs.completion_s or COMPLETION_S})
    found = refit(costs, observed, steps=steps)
    return Predictions(
        found,
        {
            name: simulate(slowed(each, found.factors), found.costs, steps=steps).samples_per_s
            for name, each in workloads.items()
        },
    )


def workload(cell: Cell, rows: Sequence[Row], num_cpus: int, rewards_s: Mapping[int, float]) -> Workload:
    """rows: of the cells for fitting."""
    alike = {each.name for each in CELLS if each.use == "fit" and _limit(each) == _limit(cell)}
    known = [row for row in rows if row["cell"] in alike]
    options = cell.settings["rewards.options"]
    waits = "wait" in options
    return workload_of(
        load("quick", cell.settings),
        lengths=lengths({name: _median(known, name) for name in _QUANTILES}),
        prompt_tokens=round(_median(known, "prompt_characters")),
        reward_s=(options["wait"]["seconds"] if waits else rewards_s[options["work"]["rounds"]],),
        reward_cores=not waits,
        judges=1024 if waits else 1,
        pools=pools(cell, num_cpus),
    )


def lengths(quantiles: Mapping[str, float]) -> list[int]:
    """Evenly drawn from straight lines between these quantiles, the first from 1 up."""
    at = np.interp(
        (np.arange(_LENGTHS) + 0.5) / _LENGTHS, [0.0, *_QUANTILES.values()], [1.0, *(quantiles[name] for name in _QUANTILES)]
    )
    return [max(1, round(each)) for each in at.tolist()]


def pools(cell: Cell, num_cpus: int) -> tuple[Pool, ...]:
    """Parts with the same CPUs share them; without a strategy all share all, with a thread each. With one, engine and learner
    have as many threads as CPUs, by which those of the tiny model gain nothing: a stage then keeps all of them busy."""
    if cell.strategy is None:
        return (Pool(num_cpus, tuple(_ROLES.values())),)
    chosen = load("quick", cell.settings).placement.cpu_weights
    weights: dict[Part, float] = {part: getattr(chosen, part) for part in PARTS}
    sets = cpu_sets(cell.strategy, PARTS, weights, num_cpus, "this machine")
    found = []
    for cpus in dict.fromkeys(sets.values()):
        parts = [part for part in PARTS if sets[part] == cpus]
        threads = tuple(1.0 if part == "scoring" else float(len(cpus)) for part in parts)
        found.append(Pool(len(cpus), tuple(_ROLES[part] for part in parts), threads))
    return tuple(found)


def measure_rewards() -> dict[int, float]:
    """Seconds of the work of each cell's reward, alone: the least of several."""
    from async_rlhf.experiments.planning.measured import rewards

    found: dict[int, float] = {}
    for cell in CELLS:
        rounds = cell.settings["rewards.options"].get("work", {}).get("rounds")
        if rounds is not None and rounds not in found:
            found[rounds] = min(_seconds(lambda rounds=rounds: rewards.work("word", rounds)) for _ in range(20))
    return found


def _seconds(work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _limit(cell: Cell) -> int:
    return int(cell.settings["generation.max_completion_length"])


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)
