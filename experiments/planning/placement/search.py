"""Every candidate of every strategy, those that fit, the fastest of each, and the trade of speed against staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.experiments.planning.placement.evaluation import Evaluation, Plan
from async_rlhf.experiments.planning.placement.on_virtual_time import best_queued_groups
from async_rlhf.experiments.planning.placement.roles import Roles, no_fit
from async_rlhf.experiments.planning.placement.settings import settings_of
from async_rlhf.experiments.planning.placement.spec import Spec
from async_rlhf.experiments.planning.placement.strategies import STRATEGIES, Problem

_MOST_REFUSED = 200
# Slower by less than this is as fast: the model of times is no finer.
_AS_FAST = 1.02


@dataclass(frozen=True)
class Found:
    """best: the fastest that this system runs, with its settings; None where it runs none, `refusal` then has the reason.
    queued_groups: with which it is fastest on virtual time. cheaper: of the same strategy, as fast within 2 % on the fewest
    devices; None where all of them are needed.

    by_strategy: the fastest of each, None where none fits. by_bound: the fastest of any strategy with that bound, by bound,
    those alone that are faster than all smaller bounds. tried: candidates of each strategy; none where the spec has not what it
    places. fitting: of all candidates, how many fit.
    """

    roles: Roles
    best: Plan | None
    cheaper: Plan | None
    settings: Mapping[str, Mapping[str, Any]]
    refusal: str
    queued_groups: int
    by_strategy: Mapping[str, Plan | None]
    by_bound: Mapping[float, Plan]
    here_by_bound: Mapping[float, Plan]
    tried: Mapping[str, int]
    fitting: int

    @property
    def candidates(self) -> int:
        return sum(self.tried.values())

    @property
    def plan(self) -> Plan:
        """The best that runs here, or else the fastest."""
        return self.best or self.fastest

    @property
    def fastest(self) -> Plan:
        """Of all, run here or not, within the bounds of the spec."""
        return min(self.by_bound.values(), key=_seconds)


def search(spec: Spec) -> Found:
    """Raises ConfigError where nothing fits."""
    names = spec.search.strategies or tuple(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"search.strategies: {name!r}; {did_you_mean(name, STRATEGIES)}")
    roles = Roles(spec)
    each = {name: _fitting(name, roles) for name in names}
    plans = [plan for fitting, _ in each.values() for plan in fitting]
    if not plans:
        raise ConfigError(f"no placement fits: {no_fit(roles)}")
    plans.sort(key=_seconds)
    bounded = _bounded(plans, spec)
    best, refusal = _first_that_runs(bounded, roles)
    queued_groups = 0 if best is None else best_queued_groups(best, roles)
    return Found(
        roles=roles,
        best=best,
        cheaper=None if best is None else _cheaper(best, spec),
        settings={} if best is None else settings_of(best, roles, queued_groups),
        refusal=refusal,
        queued_groups=queued_groups,
        by_strategy={name: next((plan for plan in plans if plan.candidate.strategy.name == name), None) for name in names},
        by_bound=_front(bounded or plans),
        here_by_bound=_front([plan for plan in bounded if plan.candidate.here]),
        tried={name: tried for name, (_, tried) in each.items()},
        fitting=len(plans),
    )


def _fitting(name: str, roles: Roles) -> tuple[list[Plan], int]:
    """Plans of this strategy that fit, and how many were tried."""
    spec, evaluation = roles.spec, Evaluation(roles)
    problem = Problem(tuple(roles.models), spec.cluster.size, spec.cluster.devices_per_node, spec.search.max_staleness)
    candidates = list(STRATEGIES[name].candidates(problem))
    return [plan for each in candidates if (plan := evaluation.plan(each)) is not None], len(candidates)


def _bounded(plans: list[Plan], spec: Spec) -> list[Plan]:
    return [plan for plan in plans if plan.candidate.max_staleness in set(spec.search.max_staleness)]


def _cheaper(best: Plan, spec: Spec) -> Plan | None:
    cluster = spec.cluster
    problem = Problem((), cluster.size, cluster.devices_per_node, ())
    for count in problem.counts():
        nodes, per_node = max(1, count // cluster.devices_per_node), min(count, cluster.devices_per_node)
        if nodes * per_node != count:
            continue
        smaller = cluster.model_copy(update={"nodes": nodes, "devices_per_node": per_node})
        roles = Roles(spec.model_copy(update={"cluster": smaller}))
        plans = sorted(_bounded(_fitting(best.candidate.strategy.name, roles)[0], spec), key=_seconds)
        as_fast = [plan for plan in plans if plan.step.seconds <= _AS_FAST * best.step.seconds]
        if (plan := _first_that_runs(as_fast, roles)[0]) is not None:
            return plan
    return None


def _first_that_runs(plans: list[Plan], roles: Roles) -> tuple[Plan | None, str]:
    """In the order of `plans`; the first refusal where all are refused."""
    if roles.models.get("train_critic", roles.policy) != roles.policy:
        return None, "models.critic differs from models.policy; this learner's critic begins as a copy of the policy"
    refusals = list[str]()
    for plan in plans:
        if plan.candidate.here and len(refusals) < _MOST_REFUSED:
            try:
                settings_of(plan, roles)
            except ConfigError as error:
                refusals.append(str(error))
            else:
                return plan, ""
    return None, refusals[0] if refusals else f"no placement that it runs fits: {no_fit(roles)}"


def _front(plans: list[Plan]) -> dict[float, Plan]:
    """plans: the fastest first."""
    found: dict[float, Plan] = {}
    least = math.inf
    for bound in sorted({plan.candidate.max_staleness for plan in plans}):
        plan = next(each for each in plans if each.candidate.max_staleness == bound)
        if plan.step.seconds < least:
            found[bound], least = plan, plan.step.seconds
    return found


def _seconds(plan: Plan) -> tuple[float, float, int]:
    """Of equally fast ones the less stale, then that of fewer sets."""
    return plan.step.seconds, plan.candidate.max_staleness, len(plan.candidate.sets)
