"""Which shares of a device's peaks a finished run has reached: for a plan of the same model on more of the same devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.calibration.of_run import RunCosts
from async_rlhf.experiments.planning.model.model_costs import Recompute
from async_rlhf.experiments.planning.model.stages import Place, decode_step_s, optimizer_s, training_s
from async_rlhf.experiments.planning.placement.layouts import Layout
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import EfficiencyConfig, Spec
from async_rlhf.run.config import Config

_LEAST = 1e-6
_HALVINGS = 60


def reached(spec: Spec, config: Config, measured: RunCosts) -> EfficiencyConfig:
    """The spec's shares with those of the run: `training`, and `launch_s` (`decode`, where a step is faster than its share lets
    it be), with which the model of stages takes what the run took; and the speed of its weight channel. config: of the run.

    Raises ConfigError where the run was faster than the spec's model can be on the spec's device.
    """
    roles = Roles.of(spec)
    asked = spec.efficiency
    decode, launch_s = _decoding(roles, config, measured)
    training = _training_share(roles, config, measured, memory=decode)
    found = {"training": training, "decode": decode, "launch_s": launch_s}
    if measured.costs.travel_s > 0:
        found["weights_bytes_per_s"] = roles.policy.weight_bytes / measured.costs.travel_s
    return asked.model_copy(update=found)


def _training_share(roles: Roles, config: Config, measured: RunCosts, *, memory: float) -> float:
    """memory: the share of the memory bandwidth, for the optimizer."""
    learner, load = config.learner, measured.workload
    tensor, context = learner.tensor_parallel, learner.sequence_parallel
    data = max(1, learner.ranks // tensor // context)
    zero_stage = learner.zero_stage if learner.backend == "deepspeed" and learner.ranks > 1 else 0
    place = roles.place("train", Layout(tensor=tensor, context=context, data=data))
    mean = sum(load.lengths) / len(load.lengths)
    row, updates = round(load.prompt_tokens + mean), load.updates_per_step
    rows = max(1, load.samples // updates)
    micro = math.ceil(rows / data / max(1, learner.micro_batch_tokens // row))
    recompute: Recompute = "full" if learner.gradient_checkpointing else "none"

    def seconds(share: float) -> float:
        at = replace(place, efficiency=replace(place.efficiency, flops=share, memory=memory))
        update = training_s(at, rows, row, micro_batches=micro, zero_stage=zero_stage, recompute=recompute)
        return updates * (update + optimizer_s(at, zero_stage=zero_stage))

    took = measured.costs.training_s(load.groups_per_batch, load.prompt_tokens, round(mean * load.samples), updates)
    return _share(seconds, took, "a learner step", roles)


def _decoding(roles: Roles, config: Config, measured: RunCosts) -> tuple[float, float]:
    """Share of the memory bandwidth, and seconds of a step besides: at half of the rows that an actor may hold."""
    load = measured.workload
    tensor = config.engine.vllm.tensor_parallel_size if config.engine.kind == "vllm" else 1
    place = roles.place("generate", Layout(tensor=tensor))
    rows = max(1, min(load.slots, load.samples // load.actors) // 2)
    context = load.prompt_tokens + sum(load.lengths) / len(load.lengths) / 2
    took = measured.costs.decode_s(rows, context)

    def at(share: float, launch_s: float) -> Place:
        return replace(place, efficiency=replace(place.efficiency, memory=share, launch_s=launch_s))

    share = place.efficiency.memory
    besides = took - decode_step_s(at(share, 0.0), rows, context)
    if besides >= 0:
        return share, besides
    return _share(lambda tried: decode_step_s(at(tried, 0.0), rows, context), took, "a decode step", roles), 0.0


def _share(seconds: Callable[[float], float], took: float, stage: str, roles: Roles) -> float:
    """At which a stage takes what it took; by bisection of its logarithm."""
    if seconds(1.0) > took:
        raise ConfigError(
            f"{stage} of the run took {took:.3g} s, and at least {seconds(1.0):.3g} s by the peaks of the spec's device "
            f"{roles.spec.cluster.device!r}: cluster.device and models.policy are to be those of the run"
        )
    low, high = math.log(_LEAST), 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) > took else (low, middle)
    return math.exp(high)
