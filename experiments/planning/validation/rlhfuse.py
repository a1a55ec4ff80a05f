"""V17: what RLHFuse's two fusions give: scoring during the tail of generation, and two trainings in each other's bubbles."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from statistics import mean

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.consolidation import consolidated
from async_rlhf.plan.devices import device
from async_rlhf.plan.fused_schedule import Fusion, Pipeline, Preference, greedy, makespan_s
from async_rlhf.plan.stages import Place, decode_step_s, inference_s, knee_rows

_THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
_SLACK = 1.2  # of a decode step that a kept replica may take, beside one with a single row
_DEPTH = {
    "llama-13b": 4,
    "llama-33b": 8,
    "llama-65b": 16,
}  # stages of 8 devices, so that each has about four billion parameters
_PREFERENCES = tuple(Preference(ratio=ratio, wait=wait) for ratio, wait in product((0.5, 1.0, 2.0), (0.0, 0.5)))


def _place(name: str, flops: float = calls.DEFAULTS.inference) -> Place:
    place = Place(model=data.model(name), device=device("H800"), efficiency=calls.efficiency(flops))
    return calls.placed(place, calls.NODE if place.model.heads % calls.NODE == 0 else calls.NODE // 2, 1, 1)


def _spread(place: Place, devices: int) -> Place:
    return calls.placed(place, place.tensor, 1, devices // place.tensor)


def _flat_rows(place: Place, context: float) -> int:
    """So many rows of one replica decode nearly as fast as one: below the knee, caches counted."""
    alone = decode_step_s(place, 1, context)
    return next(
        rows for rows in range(1, int(knee_rows(place)) + 2) if decode_step_s(place, rows + 1, context) > _SLACK * alone
    )


@cache
def _stages_s(actor: str, critic: str, length: float, spread: float, inference: float) -> dict[float, float]:
    """Threshold to the seconds of generation and scoring together."""
    table = data.published(17)
    place = _place(actor)
    replicas = table["devices"] // place.tensor
    completions = calls.lengths(table["rows"], length, spread, table["longest"])
    tokens = round(table["prompt"] + length)
    scoring = sum(
        inference_s(
            _spread(_place(name, inference), table["devices"]),
            table["rows"],
            tokens,
            head=reference,
        )
        for name, reference in ((actor, True), (critic, False), (critic, False))
    )
    room = calls.room_rows(place, (table["longest"],), table["prompt"])
    cache_bytes = place.model.kv_bytes_per_token * (table["prompt"] + table["longest"])
    return {
        threshold: consolidated(
            completions,
            replicas=replicas,
            threshold=threshold,
            most_rows=max(min(_flat_rows(place, table["prompt"] + table["longest"]), room), 1),
            step_s=lambda alive, produced: decode_step_s(place, alive, table["prompt"] + produced),
            score_s=scoring,
            move_s=place.far.send_s(cache_bytes / place.tensor),
        ).total_s
        for threshold in _THRESHOLDS
    }


def _training_gain(actor: str, critic: str) -> float:
    """1F1B of one model after the other, over the best of a few greedy fused schedules."""
    table = data.published(17)
    pipelines = []
    for name in (actor, critic):
        model, depth = data.model(name), _DEPTH[name]
        replicas = table["devices"] // (calls.NODE * depth)
        pipelines.append(
            Pipeline(
                depth=depth,
                micro_batches=math.ceil(table["mini_batch"] / replicas),
                forward_s=model.parameters / 1e9 / depth,
                activation_bytes=1.0,
            )
        )
    fusion = Fusion(*sorted(pipelines, key=lambda each: -each.depth))
    # What a search from these would at least keep: no order is taken that is longer than one after the other.
    shortest = min(makespan_s(fusion, greedy(fusion, each)) for each in _PREFERENCES)
    return fusion.serial_s / min(shortest, fusion.serial_s)


def row() -> Row:
    table = data.published(17)
    trials = data.trials(17, "mean", "spread", "inference")
    pairs = list(product(table["models"], repeat=2))
    first = {pair: _stages_s(*pair, *trials[0]) for pair in pairs}
    gains = {pair: found[0.0] / min(found.values()) for pair, found in first.items()}
    best = {pair: min(found, key=found.__getitem__) for pair, found in first.items()}
    training = {pair: _training_gain(*pair) for pair in pairs}
    claims = {name: f"{table[name][0]} to {table[name][1]}" for name in ("generation", "training")}
    figures = [
        Figure(
            group="generation and inference",
            label=_named(pair),
            unit="",
            published=None,
            claim=claims["generation"],
            predicted=gains[pair],
            span=_edges([found[0.0] / min(found.values()) for found in (_stages_s(*pair, *trial) for trial in trials)]),
        )
        for pair in pairs
    ]
    figures += [
        Figure(
            group="training", label=_named(pair), unit="", published=None, claim=claims["training"], predicted=training[pair]
        )
        for pair in pairs
    ]
    threshold = mean(best.values())
    figures.append(
        Figure(group="best threshold", label="mean", unit="of the rows", published=table["threshold"], predicted=threshold)
    )
    inside = sum(table["generation"][0] <= gain <= table["generation"][1] for gain in gains.values())
    trained = sum(table["training"][0] <= round(gain, 2) <= table["training"][1] for gain in training.values())
    return data.row(
        17,
        figures,
        holds=inside == len(pairs) and trained == len(pairs) and 0.1 <= threshold <= 0.3,
        finding=f"in range: generation and inference {inside} of {len(pairs)} pairs, training {trained} of {len(pairs)}; best "
        f"threshold {threshold:.0%} in the mean",
    )


def _named(pair: tuple[str, str]) -> str:
    return " + ".join(name.removeprefix("llama-") for name in pair)


def _edges(values: list[float]) -> tuple[float, ...]:
    return min(values), max(values)
