"""What one call of a model takes on so many devices, in a given layout or in the best one: the pieces that the rows compose."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapreplace
from itertools import groupby, product

from async_rlhf.experiments.planning.model.generation import generation_ends_s
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, Recompute
from async_rlhf.experiments.planning.model.stages import (
    Efficiency,
    Place,
    decode_step_s,
    inference_s,
    optimizer_s,
    prefill_s,
    training_s,
)
from async_rlhf.experiments.planning.placement.lengths import LengthsConfig
from async_rlhf.experiments.planning.placement.spec import EfficiencyConfig

NODE = 8
DEFAULTS = EfficiencyConfig()
"""The planner's own efficiencies, where a row fits none."""
_SLOTS = 256  # rows that vLLM decodes at once by default
_MICRO_TOKENS = 4096  # of one pass forward and back on a data-parallel part; a pipeline is filled by as many
_POINTS = _ROUNDS = 7  # of the grid of a fit
_MEMORY_SHARE = 0.85  # of a device's memory, for weights and what a call works with


def efficiency(
    flops: float = DEFAULTS.training,
    memory: float = DEFAULTS.decode,
    launch_s: float = DEFAULTS.launch_s,
    links: float = DEFAULTS.links,
) -> Efficiency:
    return Efficiency(flops=flops, memory=memory, links=links, launch_s=launch_s)


@cache
def lengths(rows: int, mean: float, spread: float, longest: int) -> tuple[int, ...]:
    """Of a batch's completions, in no particular order."""
    found = list(LengthsConfig(mean=mean, spread=spread, longest=longest).batch(rows))
    random.Random(0).shuffle(found)
    return tuple(found)


def placed(place: Place, tensor: int, pipeline: int, data: int) -> Place:
    """The same model and devices in another layout."""
    return replace(place, tensor=tensor, pipeline=pipeline, data=data, spread=tensor * pipeline * data > NODE)


def layouts(place: Place, devices: int) -> Iterator[Place]:
    """Tensor groups within a node, pipelines of up to 16 stages, data-parallel groups of the rest."""
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8, 16):
            if devices % (tensor * pipeline) == 0 and place.model.heads % tensor == 0:
                yield placed(place, tensor, pipeline, devices // (tensor * pipeline))


def generation_s(
    place: Place, completions: Sequence[int], prompt: int, *, slots: int = _SLOTS, kept_bytes: float = 0.0
) -> float:
    """From the first prompt to the last row's end; inf where the longest row finds no room.

    Rows are dealt out to the data-parallel replicas by their length; the one with the longest row is followed. kept_bytes: of
    each device, for other models.
    """
    mine = list(sorted(completions, reverse=True)[:: place.data])
    most = min(slots, room_rows(place, mine, prompt, kept_bytes))
    if not most:
        return math.inf
    longest = mine[0]
    if longest == mine[-1]:
        return _waves_s(place, len(mine), longest, prompt, most)
    random.Random(0).shuffle(mine)
    ends = generation_ends_s(
        mine,
        prompt_tokens=prompt,
        slots=most,
        room_tokens=most * (prompt + longest),
        longest=longest,
        step_s=lambda rows, context: decode_step_s(place, rows, context),
        prefill_s=lambda rows: prefill_s(place, rows, prompt),
    )
    return max(ends)


def _waves_s(place: Place, rows: int, length: int, prompt: int, most: int) -> float:
    """What `generation_ends_s` gives where all rows are equally long, without following each."""

    def wave(alive: int) -> float:
        return (
            prefill_s(place, alive, prompt) + length * decode_step_s(place, alive, prompt + (length + 1) / 2) if alive else 0.0
        )

    return rows // most * wave(most) + wave(rows % most)


def room_rows(place: Place, completions: Sequence[int], prompt: int, kept_bytes: float = 0.0) -> int:
    """Rows whose cache fits beside weights, at the mean context of rows that decode; 0 where the longest one does not."""
    part = place.tensor * place.pipeline
    room = part * (_MEMORY_SHARE * place.device.memory_bytes - kept_bytes) - place.model.weight_bytes
    tokens = room / place.model.kv_bytes_per_token
    if tokens < prompt + max(completions):
        return 0
    alive = sum(map(operator.mul, completions, completions)) / sum(completions) / 2
    return max(int(tokens / (prompt + alive)), 1)


def busy_s(place: Place, completions: Sequence[int], prompt: int, *, alive: int) -> float:
    """Of one batch among others, where each replica always decodes `alive` rows."""
    rows = len(completions) / place.data
    context = prompt + sum(map(operator.mul, completions, completions)) / sum(completions) / 2
    tokens = rows * sum(completions) / len(completions)
    return tokens / alive * decode_step_s(place, alive, context) + prefill_s(place, math.ceil(rows), prompt)


def trained_s(place: Place, rows: int, tokens: int, *, updates: int, zero_stage: int = 1) -> float:
    """All updates of one step over a batch, layers computed again in the backward pass."""
    update_rows = max(rows // updates, 1)
    micro_batches = max(math.ceil(update_rows * tokens / place.data / _MICRO_TOKENS), 1)
    recompute: Recompute = "full"
    one = training_s(place, update_rows, tokens, micro_batches=micro_batches, zero_stage=zero_stage, recompute=recompute)
    return updates * (one + optimizer_s(place, zero_stage=zero_stage))


def scored_s(place: Place, rows: int, tokens: int, *, head: bool = True) -> float:
    """One forward pass over a batch, in as many micro-batches as the pipeline has stages."""
    return inference_s(place, rows, tokens, micro_batches=place.pipeline, head=head)


def best_generation_s(place: Place, devices: int, completions: Sequence[int], prompt: int, *, kept_bytes: float = 0.0) -> float:
    """In each size of tensor groups, pipelines are made longer as long as room for caches outweighs what they add to a step."""
    best = math.inf
    for _, longer in groupby(layouts(place, devices), key=lambda each: each.tensor):
        before = math.inf
        for each in longer:
            found = generation_s(each, completions, prompt, kept_bytes=kept_bytes)
            if math.isfinite(before) and found >= before:
                break
            before, best = found, min(best, found)
    return best


def best_training(place: Place, devices: int, rows: int, tokens: int, *, updates: int, share: float = 1.0) -> Place | None:
    """share: of the devices' memory, that the model may fill, where others are on them. None where no layout fits."""
    fitting = (each for each in layouts(place, devices) if _fits(each, share))
    return min(fitting, key=lambda each: trained_s(each, rows, tokens, updates=updates), default=None)


def best_training_s(place: Place, devices: int, rows: int, tokens: int, *, updates: int, share: float = 1.0) -> float:
    best = best_training(place, devices, rows, tokens, updates=updates, share=share)
    return math.inf if best is None else trained_s(best, rows, tokens, updates=updates)


def _fits(place: Place, share: float) -> bool:
    kept = place.model.training_bytes(1, place.data) / (place.tensor * place.pipeline)
    return kept <= share * _MEMORY_SHARE * place.device.memory_bytes


def best_scoring_s(place: Place, devices: int, rows: int, tokens: int, *, head: bool = True) -> float:
    return min(scored_s(each, rows, tokens, head=head) for each in layouts(place, devices))


def device_bytes(model: ModelCosts, devices: int, *, trained: bool) -> float:
    """Of each device, where the model is divided over all of them."""
    return (model.training_bytes(3, devices) if trained else model.weight_bytes / devices) if devices else math.inf


def fit(ratios: Callable[[Sequence[float]], Iterable[float]], bounds: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Constants of a system with which predictions meet published figures: the least squares of logarithms.

    ratios: predicted over published, for given constants; bounds: of each constant, above 0. A grid of logarithms is laid ever
    closer around its best point: each round has half of the last one's width.
    """

    def loss(point: Iterable[float]) -> float:
        return sum(math.log(ratio) ** 2 for ratio in ratios(constants(point)))

    def constants(point: Iterable[float]) -> tuple[float, ...]:
        # The exponential of a logarithm may lie a last bit beyond the bound.
        return tuple(min(max(math.exp(value), low), high) for value, (low, high) in zip(point, bounds, strict=True))

    edges = [(math.log(low), math.log(high)) for low, high in bounds]
    spans, best = list(edges), [(low + high) / 2 for low, high in edges]
    for _ in range(_ROUNDS):
        axes = [[low + (high - low) * step / (_POINTS - 1) for step in range(_POINTS)] for low, high in spans]
        best = list(min(product(*axes), key=loss))
        spans = [
            (max(least, value - (high - low) / 4), min(most, value + (high - low) / 4))
            for value, (low, high), (least, most) in zip(best, spans, edges, strict=True)
        ]
    return constants(best)


def most_loaded(costs: Iterable[float], ranks: int) -> float:
    """What the most loaded of several ranks gets where each row, the most expensive first, goes to the rank with the least so
    far.

    At most 4/3 of what the best way to share gives (Graham, Bounds on multiprocessing timing anomalies, 1969), and never less
    than the most expensive row: a long completion keeps all other ranks waiting.
    """
    loads = [0.0] * ranks
    for cost in sorted(costs, reverse=True):
        heapreplace(loads, loads[0] + cost)
    return max(loads)
