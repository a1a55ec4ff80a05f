"""What a search found, as lines of text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from async_rlhf.experiments.planning.model.schedules import Circuit
from async_rlhf.experiments.planning.placement.evaluation import Filled, Plan
from async_rlhf.experiments.planning.placement.roles import Role
from async_rlhf.experiments.planning.placement.search import Found
from async_rlhf.experiments.planning.placement.settings import as_toml
from async_rlhf.experiments.planning.placement.strategies import STRATEGIES
from async_rlhf.experiments.planning.simulation.run import Simulated


def lines(found: Found) -> Iterator[str]:
    """For a terminal: the question, the plan, speed against staleness, why the others lose, and settings for `train`."""
    yield from _question(found)
    yield ""
    if found.best is None:
        yield f"No plan that runs here: {found.refusal}"
    else:
        yield f"Best that runs here: {_headline(found.best)}"
        yield from _plan(found.best, found)
    if (cheaper := found.cheaper) is not None:
        yield f"As fast within 2%, on {cheaper.devices} of the devices: {_headline(cheaper)}"
        yield from _plan(cheaper, found)
    fastest = found.fastest
    if found.best is None or fastest.step.seconds < 0.99 * found.best.step.seconds:
        yield f"Faster, not run here: {_headline(fastest)}"
        yield from _plan(fastest, found)
    yield ""
    yield from _staleness(found)
    yield ""
    yield from _others(found)
    if found.settings:
        yield ""
        yield "# For train, beside model, data and rewards:"
        yield as_toml(found.settings)


def _question(found: Found) -> Iterator[str]:
    roles, spec = found.roles, found.roles.spec
    named: dict[Role, str] = {"generate": "policy", "reference": "reference", "values": "critic", "reward": "reward model"}
    models = ", ".join(
        f"{name} of {roles.models[role].parameters / 1e9:.3g} billion parameters"
        for role, name in named.items()
        if role in roles.models
    )
    cluster = spec.cluster
    yield (
        f"{models}; {cluster.size} x {cluster.device} in {cluster.nodes} node(s); {spec.batch.groups} groups of "
        f"{spec.batch.group_size} a step"
    )
    yield (
        f"prompts of {roles.prompt} tokens, completions of {roles.mean:.0f} in the mean and {max(roles.lengths)} at most; "
        f"a verdict takes {spec.reward.seconds:g} s, {spec.reward.concurrency} at once"
    )
    if (environment := spec.environment).turns > 1:
        yield (
            f"episodes of {environment.turns} turns, whose environment takes {environment.seconds:g} s between two and returns "
            f"{environment.observation_tokens} tokens"
        )
    e = spec.efficiency
    yield (
        f"taken to be reached: {e.training:.0%} of the arithmetic in training, {e.inference:.0%} in inference, {e.decode:.0%} "
        f"of the memory bandwidth in decoding, {e.links:.0%} of the links, {1e3 * e.launch_s:.3g} ms a decode step besides; "
        f"this system sends weights at {e.weights_bytes_per_s / 1e9:.3g} GB/s"
    )
    yield f"{found.candidates} placements looked at, {found.fitting} fit into {spec.search.memory_share:.0%} of the memory"


def _headline(plan: Plan) -> str:
    return (
        f"{plan.candidate.strategy.name}, {_bound(plan.candidate.max_staleness)}: {plan.step.seconds:.3g} s a step, "
        f"{plan.samples_per_s:.3g} samples/s, {plan.device_seconds_per_million / 3600:.3g} device-hours per million samples"
    )


def _bound(bound: float) -> str:
    return "no bound of staleness" if math.isinf(bound) else f"max_staleness {bound:g}"


def _plan(plan: Plan, found: Found) -> Iterator[str]:
    for filled in plan.filled:
        idle = plan.step.idle_shares.get(filled.set.name)
        share = "" if idle is None else f", idle {idle:.0%}"
        size = found.roles.device.memory_bytes / 1e9
        yield f"  {filled.set.name}: {filled.set.devices} devices, {filled.bytes_per_device / 1e9:.0f} of {size:.0f} GB{share}"
        for role, choice in filled.choices.items():
            if role == "generate" and filled.generation is not None:
                time = filled.generation
                own = "" if time.busy_s == time.span_s else f" where batch follows batch, its longest row {time.span_s:.3g} s"
                yield f"    generate: {choice.layout}, {filled.slots} slots an engine, {time.busy_s:.3g} s a batch{own}"
            else:
                yield f"    {role}: {choice.layout}, {choice.seconds:.3g} s a batch"
    yield f"  bound by {_circuit(plan.step.bound_by)}"


def _circuit(circuit: Circuit) -> str:
    parts = [f"{stage} {seconds:.3g} s" for stage, seconds in circuit.stages if seconds >= 0.01 * circuit.step_s]
    return f"{circuit.name}: {' + '.join(parts)}"


def _staleness(found: Found) -> Iterator[str]:
    yield "Speed against staleness (the fastest of any strategy, and of those that run here):"
    bounds = sorted({*found.by_bound, *found.here_by_bound})
    for bound in bounds:
        cells = []
        for name, plans in (("any", found.by_bound), ("here", found.here_by_bound)):
            if (plan := plans.get(bound)) is not None:
                cells.append(f"{name} {plan.step.seconds:.3g} s ({plan.candidate.strategy.name})")
        yield f"  {_bound(bound):22} {', '.join(cells)}"


def _others(found: Found) -> Iterator[str]:
    """The fastest of each strategy, and what it loses to."""
    best = found.best or found.fastest
    yield "Strategies, the fastest of each, and what bounds it:"
    there = sorted(found.by_strategy.items(), key=lambda item: math.inf if item[1] is None else item[1].step.seconds)
    for name, plan in there:
        if plan is None:
            tried = found.tried[name]
            why = f"none of {tried} placements fits" if tried else "it wants more roles or devices than there are"
            yield f"  {name:16}       -         {why} ({STRATEGIES[name].source})"
            continue
        ratio = plan.step.seconds / best.step.seconds
        bound = "inf" if math.isinf(plan.candidate.max_staleness) else f"{plan.candidate.max_staleness:g}"
        yield f"  {name:16} {plan.step.seconds:7.3g} s {ratio:5.2f}x N={bound:3} {_circuit(plan.step.bound_by)}"


def as_json(found: Found, simulated: Simulated | None = None) -> dict[str, Any]:
    """The same for a script. Seconds are of a step; bytes of a device. simulated: the best plan on virtual time."""
    return {
        **({} if simulated is None else {"simulated": _simulated_as_json(simulated)}),
        "devices": found.roles.spec.cluster.size,
        "candidates": found.candidates,
        "fitting": found.fitting,
        "best": None if found.best is None else _as_json(found.best),
        "cheaper": None if found.cheaper is None else _as_json(found.cheaper),
        "refusal": found.refusal,
        "settings": found.settings,
        "fastest": _as_json(found.fastest),
        "by_max_staleness": [_as_json(plan) for plan in found.by_bound.values()],
        "by_max_staleness_here": [_as_json(plan) for plan in found.here_by_bound.values()],
        "by_strategy": {name: None if plan is None else _as_json(plan) for name, plan in found.by_strategy.items()},
    }


def _as_json(plan: Plan) -> dict[str, Any]:
    bound = plan.candidate.max_staleness
    return {
        "strategy": plan.candidate.strategy.name,
        "devices": plan.devices,
        "runs_here": plan.candidate.here,
        "max_staleness": None if math.isinf(bound) else bound,
        "seconds": plan.step.seconds,
        "samples_per_s": plan.samples_per_s,
        "device_seconds_per_million_samples": plan.device_seconds_per_million,
        "bound_by": plan.step.bound_by.name,
        "idle_shares": dict(plan.step.idle_shares),
        "stages": {stage: {"busy_s": time.busy_s, "span_s": time.span_s} for stage, time in plan.times.items()},
        "sets": [_set_as_json(filled) for filled in plan.filled],
    }


def _simulated_as_json(found: Simulated) -> dict[str, Any]:
    return {
        "steps": found.steps,
        "seconds": found.seconds_per_step,
        "samples_per_s": found.samples_per_s,
        "bound_by": found.bound_by,
        "staleness_tokens": dict(found.staleness),
        "queue_depth_mean": found.queue_depth_mean,
        "queue_depth_max": found.queue_depth_max,
        "roles": {name: {"idle": time.idle, "waits_for": time.waits_for} for name, time in found.roles.items()},
        "ledger": vars(found.ledger),
    }


def _set_as_json(filled: Filled) -> dict[str, Any]:
    roles = {role: {**vars(choice.layout), "seconds": choice.seconds} for role, choice in filled.choices.items()}
    return {
        "name": filled.set.name,
        "devices": filled.set.devices,
        "bytes": filled.bytes_per_device,
        "slots": filled.slots,
        "roles": roles,
    }
