"""What a finished run would have done with another bound of staleness, or with an actor more: its own constants, simulated.

The run's constants (`of_run`) are refitted to its measured speed and to the wait of its learner, so that its own simulation is
as near as can be: without the wait a run that waits for its actors cannot be distinguished from one that waits for its learner.
What its roles took from each other is in them: predictions hold on the same hardware. An actor more is taken to bring hardware
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.calibration.of_run import RunCosts
from async_rlhf.experiments.planning.simulation.run import Simulated, simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Terms, Workload

BOUNDS = (0, 1, 2, 4, 8)
_NEAR = 0.98  # of the fastest: no reason for more staleness
_STEPS, _STEPS_TO_FIT = 60, 40
KINDS = ("generation", "training", "publication", "scoring")
_DIFFERENCE, _FARTHEST = 0.03, 1.0  # of logarithms of factors: for a slope, and in one step
_DAMPING, _HIGHEST = 0.01, 100.0
_SMALL, _ENOUGH = 1e-10, 0.99  # a sum of squares that is none, and one that is hardly less than the one before


@dataclass(frozen=True)
class WhatIf:
    """costs: refitted. by_bound: the run with the key as `max_staleness`; its own bound is among them."""

    measured: RunCosts
    costs: Costs
    factors: Mapping[str, float]
    by_bound: Mapping[int, Simulated]
    with_another_actor: Simulated

    @property
    def own(self) -> Simulated:
        return self.by_bound[self.measured.workload.max_staleness]

    @property
    def best(self) -> int:
        """The smallest bound that is about as fast as any."""
        most = max(found.samples_per_s for found in self.by_bound.values())
        return min(bound for bound, found in self.by_bound.items() if found.samples_per_s >= _NEAR * most)


def what_if(measured: RunCosts) -> WhatIf:
    factors = refit(measured)
    load, costs = scaled(measured.workload, measured.costs, factors)
    workloads = {bound: bounded for bound in sorted({*BOUNDS, load.max_staleness}) if (bounded := _bounded(load, bound))}
    return WhatIf(
        measured,
        costs,
        factors,
        {bound: simulate(each, costs, steps=_STEPS) for bound, each in workloads.items()},
        simulate(replace(load, actors=load.actors + 1), costs, steps=_STEPS),
    )


def refit(measured: RunCosts) -> dict[str, float]:
    """By kind of stage, the factors with the least sum of log²(simulated / measured) of the speed and of the squared difference
    of the idle share; `scaled` applies them.

    By Levenberg and Marquardt (Marquardt, An Algorithm for Least-Squares Estimation of Nonlinear Parameters, SIAM 11(2), 1963)
    in logarithms of the factors, with differences over a few per cent: where another role begins to bound a run, its speed has
    no derivative.
    """

    def errors(at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithm of simulated over measured speed; difference of the idle shares."""
        run = simulate(
            *scaled(measured.workload, measured.costs, dict(zip(KINDS, np.exp(at).tolist(), strict=True))), steps=_STEPS_TO_FIT
        )
        speed = math.log(run.samples_per_s / measured.samples_per_s)
        return np.array([speed, run.roles["learner"].idle - measured.learner_idle])

    best, damping, enough = np.zeros(len(KINDS)), _DAMPING, False
    left = errors(best)
    while not enough and damping < _HIGHEST:
        slopes = np.stack([(errors(best + move) - left) / _DIFFERENCE for move in _DIFFERENCE * np.eye(len(KINDS))], axis=1)
        found, tried = left, best
        while damping < _HIGHEST and found @ found >= left @ left > _SMALL:
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(KINDS)), -slopes.T @ left)
            tried = best + np.clip(step, -_FARTHEST, _FARTHEST)
            found, damping = errors(tried), damping * 4
        enough = bool(found @ found > _ENOUGH * (left @ left) or found @ found <= _SMALL)
        if found @ found < left @ left:
            best, left, damping = tried, found, damping / 16
    return dict(zip(KINDS, np.exp(best).tolist(), strict=True))


def scaled(workload: Workload, costs: Costs, factors: Mapping[str, float]) -> tuple[Workload, Costs]:
    """The constants of each kind of stage times its factor; those of scoring are the workload's."""
    generation, training, publication, scoring = (factors[kind] for kind in KINDS)

    def times(terms: Terms, factor: float) -> Terms:
        first, second, third = terms
        return first * factor, second * factor, third * factor

    return replace(workload, reward_s=[seconds * scoring for seconds in workload.reward_s]), Costs(
        decode=times(costs.decode, generation),
        prefill=times(costs.prefill, generation),
        training=times(costs.training, training),
        copy_s=costs.copy_s * publication,
        travel_s=costs.travel_s * publication,
        adopt_s=costs.adopt_s * publication,
    )


def _bounded(load: Workload, bound: int) -> Workload | None:
    """None under a bound with which the run would hang."""
    try:
        return replace(load, max_staleness=bound)
    except ConfigError:
        return None


def lines(found: WhatIf) -> Iterator[str]:
    """For a terminal."""
    run, load = found.measured, found.measured.workload
    yield (
        f"{run.steps} steps of {load.samples} completions by {load.actors} actor(s), max_staleness {load.max_staleness}: "
        f"{run.samples_per_s:.4g} samples/s, the learner waited for {run.learner_idle:.0%} of its time"
    )
    for bound, each in found.by_bound.items():
        own = f" (this run; {each.samples_per_s / run.samples_per_s - 1:+.0%})" if bound == load.max_staleness else ""
        yield f"  max_staleness {bound:<3} {each.samples_per_s:8.4g} samples/s, bound by {each.bound_by}{own}"
    more = found.with_another_actor
    yield f"  an actor more     {more.samples_per_s:8.4g} samples/s, bound by {more.bound_by}, with hardware of its own"
    yield ""
    yield "# For train: the least staleness that is about as fast as any"
    yield f"[queue]\nmax_staleness = {found.best}"


def as_json(found: WhatIf) -> dict[str, Any]:
    """Speeds in samples/s."""
    run = found.measured
    return {
        "steps": run.steps,
        "samples_per_s": run.samples_per_s,
        "learner_idle": run.learner_idle,
        "max_staleness": run.workload.max_staleness,
        "actors": run.workload.actors,
        "costs": asdict(found.costs),
        "factors": dict(found.factors),
        "by_max_staleness": {str(bound): _speed(each) for bound, each in found.by_bound.items()},
        "with_another_actor": _speed(found.with_another_actor),
        "settings": {"queue": {"max_staleness": found.best}},
    }


def _speed(found: Simulated) -> dict[str, Any]:
    return {"samples_per_s": found.samples_per_s, "bound_by": found.bound_by}
