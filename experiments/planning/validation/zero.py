"""A PPO step of systems that train by ZeRO-3: DeepSpeed-Chat, all on all devices, and OpenRLHF, devices for each role."""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_rlhf.experiments.planning.model.stages import Place, decode_step_s, prefill_s
from async_rlhf.experiments.planning.validation import calls

_ALONE_BYTES = 30e9  # weights up to which one device generates by itself


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one length, in tokens."""

    rows: int
    prompt: int
    answer: int
    updates: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.answer,) * self.rows


def one_group_s(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """DeepSpeed-Chat: ZeRO-3 over all devices, weights gathered into tensor groups of a node to generate."""
    return _gather_s(actor, devices) + _gathered_generation_s(actor, devices, batch) + _rest_s(actor, critic, devices, batch)


def _gathered_generation_s(actor: Place, devices: int, batch: Batch) -> float:
    """In the smallest tensor groups that hold the weights, beside ZeRO-3's shards of training."""
    kept = calls.device_bytes(actor.model, devices, trained=True)
    for tensor in (1, 2, 4, 8):
        room = 0.85 * actor.device.memory_bytes - kept
        if devices % tensor == 0 and (actor.model.weight_bytes / tensor < 0.5 * room or tensor == calls.NODE):
            break
    return calls.generation_s(calls.placed(actor, tensor, 1, devices // tensor), batch.answers, batch.prompt)


def streamed_s(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """DeepSpeed-Chat without its hybrid engine: ZeRO-3 gathers the weights anew for every decode step."""
    own, rows, gather = calls.placed(actor, 1, 1, devices), math.ceil(batch.rows / devices), _gather_s(actor, devices)
    step = gather + decode_step_s(own, rows, batch.prompt + (batch.answer + 1) / 2)
    return gather + prefill_s(own, rows, batch.prompt) + batch.answer * step + _rest_s(actor, critic, devices, batch)


def _gather_s(actor: Place, devices: int) -> float:
    return calls.placed(actor, 1, 1, devices).far.gather_s(actor.model.weight_bytes, devices)


def _rest_s(actor: Place, critic: Place, devices: int, batch: Batch) -> float:
    """Of a step behind generation: reference, values, reward model, both trainings, each by ZeRO-3 over all devices."""
    own, other = (calls.placed(each, 1, 1, devices) for each in (actor, critic))
    return (
        _scored_s(own, batch)
        + 2 * _scored_s(other, batch)
        + sum(calls.trained_s(each, batch.rows, batch.tokens, updates=batch.updates, zero_stage=3) for each in (own, other))
    )


def groups_s(actor: Place, critic: Place, devices: int, batch: Batch, share: float) -> float:
    """OpenRLHF: engines, actor, critic and frozen models on devices of their own, one stage after the other.

    share: of the devices, for engines; the rest is divided evenly.
    """
    engines = max(int(share * devices), 1)
    part = max((devices - engines) // 3, 1)
    tensor = min(engines, 1 if actor.model.weight_bytes < _ALONE_BYTES else calls.NODE)
    own, other = (calls.placed(each, 1, 1, part) for each in (actor, critic))
    return (
        calls.generation_s(calls.placed(actor, tensor, 1, max(engines // tensor, 1)), batch.answers, batch.prompt)
        + max(_scored_s(own, batch), _scored_s(other, batch))
        + max(calls.trained_s(each, batch.rows, batch.tokens, updates=batch.updates, zero_stage=3) for each in (own, other))
    )


def _scored_s(place: Place, batch: Batch) -> float:
    """A forward pass, with weights gathered for it."""
    return calls.scored_s(place, batch.rows, batch.tokens) + place.far.gather_s(place.model.weight_bytes, place.data)
