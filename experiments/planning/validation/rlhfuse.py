"""V17: what RLHFuse's two fusions give: scoring during the tail of generation, and two trainings in each other's bubbles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from statistics import mean

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.stages import Place, decode_step_s, inference_s, knee_rows
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.fused import Fusion, Pipeline, greedy, makespan_s
from async_rlhf.experiments.planning.validation.rows import Figure, Row, model, published, spanned, trials
from async_rlhf.experiments.planning.validation.rows import row as row_of

_THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
_SLACK = 1.2  # of a decode step that a kept replica may take, beside one with a single row
# Stages of 8 devices, so that each has about four billion parameters.
_DEPTH = {"llama-13b": 4, "llama-33b": 8, "llama-65b": 16}
Pair = tuple[str, str]
"""Actor and critic."""


def consolidated_s(
    lengths: Sequence[int],
    *,
    replicas: int,
    threshold: float,
    most_rows: int,
    step_s: Callable[[int, float], float],
    score_s: float,
    move_s: float = 0.0,
) -> float:
    """When the last row is scored, where the tail of generation is moved to few replicas and the others score meanwhile.

    RLHFuse (Zhong et al., arXiv 2409.13221, section 4): when no more than a threshold of rows is unfinished, those that are
    left, with their key-value caches, go to the fewest replicas that hold them below the knee of a decode step; the devices of
    the others score what is finished. No row is scored before it is complete.

    lengths: tokens of the completions, all alive at once. threshold: share of the rows, 0 to 1; 0: generation, then scoring.
    most_rows: that one kept replica takes. step_s(alive, produced): of a replica with so many rows, each with so many tokens.
    score_s: of all rows on all replicas; it grows with the tokens and falls with the replicas that do it. move_s: of a row's
    cache.
    """
    rows = sorted(lengths)
    tokens, total = sum(rows), len(rows)
    left = min(math.floor(threshold * total), total - 1)
    kept = min(math.ceil(left / most_rows), replicas - 1) if left else 0
    now, produced, at = 0.0, 0, 0
    moved_at, ended = math.inf, 0
    while at < total:
        alive, moved = total - at, bool(kept) and total - at <= left
        if moved and math.isinf(moved_at):
            now += move_s * math.ceil(alive / replicas)
            moved_at, ended = now, sum(rows[:at])
        stretch = rows[at] - produced
        now += stretch * step_s(math.ceil(alive / (kept if moved else replicas)), produced + stretch / 2)
        produced = rows[at]
        while at < total and rows[at] == produced:
            at += 1
    if math.isinf(moved_at):
        return now + score_s
    # Finished rows are scored by the free replicas while the tail is made; what remains, by all of them.
    free_share = (replicas - kept) / replicas
    return now + score_s - min(ended / tokens * score_s, (now - moved_at) * free_share)


def _place(name: str, flops: float = calls.DEFAULTS.inference) -> Place:
    place = Place(model=model(name), device=device("H800"), efficiency=calls.efficiency(flops))
    return calls.placed(place, calls.NODE if place.model.heads % calls.NODE == 0 else calls.NODE // 2, 1, 1)


def _flat_rows(place: Place, context: float) -> int:
    """So many rows of one replica decode nearly as fast as one: below the knee, caches counted."""
    alone = decode_step_s(place, 1, context)
    return next(
        rows for rows in range(1, int(knee_rows(place)) + 2) if decode_step_s(place, rows + 1, context) > _SLACK * alone
    )


@cache
def _stages_s(pair: Pair, length: float, spread: float, inference: float) -> dict[float, float]:
    """Threshold to the seconds of generation and scoring together."""
    (actor, critic), table = pair, published(17)
    place, prompt, longest = _place(actor), table["prompt"], table["longest"]
    tokens, most = round(prompt + length), prompt + longest
    scoring = 0.0
    for name, reference in ((actor, True), (critic, False), (critic, False)):
        one = _place(name, inference)
        spread_out = calls.placed(one, one.tensor, 1, table["devices"] // one.tensor)
        scoring += inference_s(spread_out, table["rows"], tokens, head=reference)
    return {
        threshold: consolidated_s(
            calls.lengths(table["rows"], length, spread, longest),
            replicas=table["devices"] // place.tensor,
            threshold=threshold,
            most_rows=max(min(_flat_rows(place, most), calls.room_rows(place, (longest,), prompt)), 1),
            step_s=lambda alive, produced: decode_step_s(place, alive, prompt + produced),
            score_s=scoring,
            move_s=place.far.send_s(place.model.kv_bytes_per_token * most / place.tensor),
        )
        for threshold in _THRESHOLDS
    }


def _training_gain(pair: Pair) -> float:
    """1F1B of one model after the other, over the best of a few greedy fused schedules."""
    table, pipelines = published(17), []
    for name in pair:
        replicas = table["devices"] // (calls.NODE * _DEPTH[name])
        micro_batches = math.ceil(table["mini_batch"] / replicas)
        pipelines.append(Pipeline(_DEPTH[name], micro_batches, model(name).parameters / 1e9 / _DEPTH[name]))
    fusion = Fusion(*sorted(pipelines, key=lambda each: -each.depth))
    # What a search from these would at least keep: no order is taken that is longer than one after the other.
    shortest = min(makespan_s(fusion, greedy(fusion, *each)) for each in product((0.5, 1.0, 2.0), (0.0, 0.5)))
    return fusion.serial_s / min(shortest, fusion.serial_s)


def row() -> Row:
    table = published(17)
    facts = trials(17, "mean", "spread", "inference")
    pairs: list[Pair] = list(product(table["models"], repeat=2))
    stages = {pair: [_stages_s(pair, *each) for each in facts] for pair in pairs}
    gains = {pair: [each[0.0] / min(each.values()) for each in found] for pair, found in stages.items()}
    training = {pair: _training_gain(pair) for pair in pairs}
    claims = {name: f"{table[name][0]} to {table[name][1]}" for name in ("generation", "training")}
    named = {pair: " + ".join(name.removeprefix("llama-") for name in pair) for pair in pairs}
    threshold = mean(min(found[0], key=found[0].__getitem__) for found in stages.values())
    figures = [
        *(
            spanned("generation and inference", named[pair], "", None, gains[pair], claim=claims["generation"])
            for pair in pairs
        ),
        *(Figure("training", named[pair], "", None, training[pair], claim=claims["training"]) for pair in pairs),
        Figure("best threshold", "mean", "of the rows", table["threshold"], threshold),
    ]
    inside = sum(table["generation"][0] <= found[0] <= table["generation"][1] for found in gains.values())
    trained = sum(table["training"][0] <= round(gain, 2) <= table["training"][1] for gain in training.values())
    return row_of(
        17,
        figures,
        holds=inside == len(pairs) and trained == len(pairs) and 0.1 <= threshold <= 0.3,
        finding=f"in range: generation and inference {inside} of {len(pairs)} pairs, training {trained} of {len(pairs)}; best "
        f"threshold {threshold:.0%} in the mean",
    )
