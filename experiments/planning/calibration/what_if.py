"""What a finished run would have done with another bound of staleness, or with an actor more: its own constants, simulated.

The run's constants (`of_run`) are refitted to its measured speed and to the wait of its learner, so that its own simulation is
as near as can be. What its roles took from each other is in them: predictions hold on the same hardware. An actor more is taken
to bring hardware of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.calibration.of_run import RunCosts
from async_rlhf.experiments.planning.simulation.refitting import refit, scaled
from async_rlhf.experiments.planning.simulation.run import Simulated, simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Workload

BOUNDS = (0, 1, 2, 4, 8)
_NEAR = 0.98  # of the fastest: no reason for more staleness
_STEPS = 60


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
    factors = refit(measured.costs, measured)
    load, costs = scaled(measured.workload, measured.costs, factors)
    workloads = {bound: bounded for bound in sorted({*BOUNDS, load.max_staleness}) if (bounded := _bounded(load, bound))}
    return WhatIf(
        measured,
        costs,
        factors,
        {bound: simulate(each, costs, steps=_STEPS) for bound, each in workloads.items()},
        simulate(replace(load, actors=load.actors + 1), costs, steps=_STEPS),
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
