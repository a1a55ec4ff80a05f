"""`async-rlhf plan` and `try machine`, called by the command line through the entry points in pyproject.toml.

Each gives the text to print. All refusals are ConfigError, before anything is searched or measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import write_whole
from async_rlhf.experiments.planning.calibration import WhatIf, measure, reached, times_of_run, what_if
from async_rlhf.experiments.planning.model.stages import catalogue
from async_rlhf.experiments.planning.placement.search import Found, as_toml, search
from async_rlhf.experiments.planning.placement.spec import read
from async_rlhf.experiments.planning.placement.step import Plan, Seconds, StepTime
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.shipped import named_file, plans

_MEASURED_S = 2.0  # for each of three peaks


def list_devices() -> str:
    return "\n".join(
        f"{name:10} {device.peak_flops / 1e12:6.0f} TFLOP/s {device.memory_bytes / 1e9:4.0f} GB "
        f"{device.memory_bytes_per_s / 1e9:5.0f} GB/s, link {device.link_bytes_per_s / 1e9:4.0f} GB/s, network "
        f"{device.network_bytes_per_s / 1e9:3.0f} GB/s"
        for name, device in catalogue().items()
    )


def calibrate(*, device: str, dtype: str, threads: int) -> str:
    """Sections of a spec, with the device that this machine is."""
    return as_toml({"cluster": {"device": "own", "own": measure(device, dtype, threads, _MEASURED_S).model_dump()}})


def plan(spec: Path | None, from_run: Path | None, *, settings: Path | None, as_json: bool) -> str:
    """settings: file to write."""
    if spec is None and from_run is None:
        raise ConfigError("plan needs a SPEC.toml, --from-run RUN, or --devices")
    if spec is None and settings is not None:
        raise ConfigError("--settings is of a plan: give a SPEC.toml beside --from-run")
    if settings is not None and not settings.resolve().parent.is_dir():
        raise ConfigError(f"--settings {str(settings)!r}: its folder does not exist")
    if spec is None:
        assert from_run is not None
        speeds = what_if(times_of_run(RunDir.existing(from_run)))
        return json.dumps(what_if_as_json(speeds), indent=1) if as_json else "\n".join(what_if_lines(speeds))
    question = read(named_file("plan", spec, plans()))
    if from_run is not None:
        run = RunDir.existing(from_run)
        question = question.model_copy(update={"efficiency": reached(question, run.config(), times_of_run(run))})
    planned = search(question)
    if settings is not None:
        if not planned.settings:
            raise ConfigError(f"no settings to write: {planned.refusal}")
        write_whole(settings, as_toml(planned.settings).encode())
    return json.dumps(plan_as_json(planned), indent=1) if as_json else "\n".join(plan_lines(planned))


# -- what is printed of a plan -------------------------------------------------------------------------------------------


def plan_lines(found: Found) -> Iterator[str]:
    """For a terminal: the question, the plan, speed against staleness, and settings for `train`."""
    yield from _question(found)
    share = found.roles.spec.search.memory_share
    yield f"{found.tried} placements looked at, {found.fitting} fit into {share:.0%} of the memory"
    yield ""
    yield from _plan("Best", found.best, found)
    if found.cheaper is not None:
        yield from _plan(f"As fast within 2%, on {found.cheaper.devices} of the devices", found.cheaper, found)
    yield ""
    yield "Speed against staleness: the fastest with each bound, and what its step waits for"
    for bound, plan in found.by_bound.items():
        yield f"  max_staleness {bound:<4} {plan.step.seconds:7.3g} s  {plan.placement!s:20} {plan.step.bound_by}"
    yield ""
    yield "# For train, beside model, data and rewards:" if found.settings else f"No settings for train: {found.refusal}"
    yield as_toml(found.settings)


def _question(found: Found) -> Iterator[str]:
    roles, spec, cluster = found.roles, found.roles.spec, found.roles.spec.cluster
    reward = "" if roles.reward is None else f", reward model of {roles.reward.parameters / 1e9:.3g} billion"
    beside = [name for name, there in (("a reference", spec.loss.needs_reference), ("a critic", spec.models.critic)) if there]
    yield (
        f"policy of {roles.policy.parameters / 1e9:.3g} billion parameters{''.join(f', {name}' for name in beside)}{reward}; "
        f"{cluster.size} x {cluster.device} in {cluster.nodes} node(s); {spec.batch.groups} groups of "
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
        f"weights are sent at {e.weights_bytes_per_s / 1e9:.3g} GB/s"
    )


def _plan(name: str, plan: Plan, found: Found) -> Iterator[str]:
    place, engines, learner, idle = plan.placement, plan.engines, plan.learner, plan.step.idle_shares

    def pool(name: str, lane: str, devices: int, held: float) -> str:
        size = found.roles.device.memory_bytes / 1e9
        return f"  {name}: {devices} devices, {held / 1e9:.0f} of {size:.0f} GB, idle {idle[lane]:.0%}"

    yield (
        f"{name}: {place}; max_staleness {place.max_staleness}: {plan.step.seconds:.3g} s a step, "
        f"{plan.samples_per_s:.3g} samples/s, {plan.device_seconds_per_million / 3600:.3g} device-hours per million samples"
    )
    yield pool("actors", "all" if place.colocated else "actors", place.actors, engines.bytes_per_device)
    alone = "" if engines.busy_s == engines.span_s else f" where batch follows batch, its longest row {engines.span_s:.3g} s"
    yield f"    generate: {engines.layout}, {engines.slots} slots an engine, {engines.busy_s:.3g} s a batch{alone}"
    yield pool("learner", "all" if place.colocated else "learner", place.learner, learner.bytes_per_device)
    yield f"    {_passes(learner.seconds)} a batch: {learner.layout}"
    if plan.scorers is not None:
        yield pool("scorers", "scorers", place.scorers, plan.scorers.bytes_per_device)
        yield f"    {_passes(plan.scorers.seconds)} a batch"
    yield f"  bound by {plan.step.bound_by}"


def _passes(seconds: Seconds) -> str:
    return " + ".join(f"{name} {taken:.3g} s" for name, taken in seconds.items())


def plan_as_json(found: Found) -> dict[str, Any]:
    """The same for a script. Seconds are of a step; bytes of a device."""
    return {
        "placements": found.tried,
        "fitting": found.fitting,
        "best": _as_json(found.best),
        "cheaper": None if found.cheaper is None else _as_json(found.cheaper),
        "by_max_staleness": [_as_json(plan) for plan in found.by_bound.values()],
        "settings": found.settings,
        "refusal": found.refusal,
    }


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        **asdict(plan),
        "seconds": plan.step.seconds,
        "samples_per_s": plan.samples_per_s,
        "device_seconds_per_million_samples": plan.device_seconds_per_million,
        "bound_by": plan.step.bound_by.name,
    }


# -- and of a run --------------------------------------------------------------------------------------------------------


def what_if_lines(found: WhatIf) -> Iterator[str]:
    """For a terminal."""
    run, own_bound = found.run, found.run.bound.max_staleness
    yield (
        f"{run.steps} steps of {run.rows} completions by {run.actors} actor(s), max_staleness {own_bound}: "
        f"{run.samples_per_s:.4g} samples/s, the learner waited for {run.learner_idle:.0%} of its time"
    )
    made_s = run.step_s / found.factor
    yield f"a step took {run.step_s:.3g} s, its stages make {made_s:.3g} s: below, what bounds it is times {found.factor:.2f}"
    for bound, step in found.by_bound.items():
        this = " (this run)" if bound == own_bound else ""
        yield f"  max_staleness {bound:<3} {found.samples_per_s(step):8.4g} samples/s, bound by {step.bound_by.name}{this}"
    more = found.with_another_actor
    speed = found.samples_per_s(more)
    yield f"  an actor more     {speed:8.4g} samples/s, bound by {more.bound_by.name}, with hardware of its own"
    yield ""
    yield "# For train: the least staleness that is about as fast as any"
    yield f"[queue]\nmax_staleness = {found.best}"


def what_if_as_json(found: WhatIf) -> dict[str, Any]:
    """run: its times, in seconds. Predictions in samples/s."""

    def predicted(step: StepTime) -> dict[str, Any]:
        return {"samples_per_s": found.samples_per_s(step), "bound_by": step.bound_by.name}

    return {
        "run": asdict(found.run) | {"samples_per_s": found.run.samples_per_s},
        "factor": found.factor,
        "by_max_staleness": {str(bound): predicted(step) for bound, step in found.by_bound.items()},
        "with_another_actor": predicted(found.with_another_actor),
        "settings": {"queue": {"max_staleness": found.best}},
    }
