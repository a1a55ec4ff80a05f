"""V2 and V5: what moves between training and generation in HybridFlow, and which of its placements is fastest."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from statistics import mean

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.resharding import (
    Sharding,
    Transition,
    gather_from_zero,
    gather_micro_data_parallel,
    gather_model_parallel,
)
from async_rlhf.experiments.planning.model.stages import Place
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import Figure, Row, model, published, row


def resharding() -> Row:
    """V2: table 2 of the paper, written as it stands there, beside the model's functions."""
    found = {"DeepSpeed-Chat": [0, 0], "HybridFlow-V": [0, 0], "HybridFlow": [0, 0]}

    def count(name: str, reached: Transition, expected: Transition) -> None:
        found[name][0] += reached == expected
        found[name][1] += 1

    for t, p, d in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3)):
        training, devices = Sharding(t, p, d), t * p * d
        for name, way, parts in (
            ("DeepSpeed-Chat", gather_from_zero, devices),
            ("HybridFlow-V", gather_model_parallel, t * p),
        ):
            count(name, way(training), Transition(Fraction(parts - 1, parts), Fraction(1), Fraction(1, parts)))
        for t_g, p_g in product((1, 2, 4, 8), (1, 2, 4)):
            if t % t_g == 0 and p % p_g == 0:
                held = t_g * p_g
                expected = Transition(Fraction(t * p - held, held * t * p), Fraction(1, held), Fraction(0))
                count("HybridFlow", gather_micro_data_parallel(training, Sharding(t_g, p_g)), expected)
    figures = [Figure("layouts equal", name, "", many, equal, "exact") for name, (equal, many) in found.items()]
    paper, moved = published(2)["bytes_70b"] / 1e9, model("llama-70b").weight_bytes / 1e9
    return row(
        2,
        [*figures, Figure("weights of 70B", "", "GB", paper, moved)],
        holds=all(equal == many for equal, many in found.values()),
        finding="equal as fractions; tests/planning counts the same volumes on numbered shards",
    )


# Models of each set, with the sets' shares of the devices: as one, actor and reference apart from critic and reward model, each
# apart, and the actor apart from the rest (HybridFlow's colocate, split, standalone and a division that it also searches).
_Set = tuple[str, ...]
_PLACEMENTS: dict[str, tuple[_Set, ...]] = {
    "colocated": (("actor", "reference", "critic", "reward"),),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": (("actor",), ("reference",), ("critic",), ("reward",)),
}
_SHARES = {1: ((1.0,),), 2: ((0.5, 0.5), (0.75, 0.25)), 4: ((0.25,) * 4, (0.5, 0.125, 0.25, 0.125), (0.5, 0.125, 0.125, 0.25))}
_CALLS = {"generate": ("actor",), "score": ("reference", "critic", "reward"), "train": ("actor", "critic")}


def placements() -> Row:
    """V5: for each size and number of devices, the fastest division against everything on all devices."""
    table = published(5)
    figures, early, late = [], 0, 0
    for name, devices in product(table["models"], table["devices"]):
        steps = {placement: _step_s(name, devices, sets) for placement, sets in _PLACEMENTS.items()}
        if math.isinf(steps["colocated"]):
            continue
        best = min(steps, key=steps.__getitem__)
        early += best != "colocated" and devices <= 64
        late += best != "colocated" and devices >= 96
        lead = min(steps["split"], steps["standalone"]) / steps["colocated"]
        if math.isfinite(lead):
            label = f"{name.removeprefix('llama-')} on {devices}: {best}"
            some, claim = ("up to 64", "above 1") if devices <= 64 else ("96 to 128", "some below 1")
            figures.append(Figure(f"divided / colocated, {some}", label, "", None, lead, claim=claim))
    figures.sort(key=lambda each: each.group, reverse=True)
    means = [mean(each.predicted for each in figures if f" {devices}:" in each.label) for devices in (16, 128)]
    finding = (
        f"a division wins in {early} cases up to 64 devices and in {late} at 96 and 128; the best one takes {means[0]:.2f} "
        f"times as long on 16 devices in the mean, {means[1]:.2f} times on 128"
    )
    return row(5, figures, holds=early == 0 and late > 0, finding=finding)


def _step_s(name: str, devices: int, sets: tuple[_Set, ...]) -> float:
    """By the best division: calls of a set follow each other, sets work at the same time."""
    divisions = ([int(share * devices) for share in shares] for shares in _SHARES[len(sets)])
    return min(
        sum(
            max(
                sum(_call_s(name, stage, role, roles, count) for role in roles if role in _CALLS[stage])
                for roles, count in zip(sets, counts, strict=True)
            )
            for stage in _CALLS
        )
        for counts in divisions
    )


def _call_s(name: str, stage: str, role: str, together: _Set, devices: int) -> float:
    """together: the models of its set, each divided over all its devices."""
    table = published(5)
    place = Place(model=model(name), device=device("A100-80GB"), efficiency=calls.efficiency())
    rows, tokens = table["rows"], table["prompt"] + table["answer"]
    kept = sum(calls.device_bytes(place.model, devices, trained=each in _CALLS["train"]) for each in together)
    if kept > 0.85 * place.device.memory_bytes:
        return math.inf
    if stage == "generate":
        return calls.best_generation_s(place, devices, (table["answer"],) * rows, table["prompt"], kept_bytes=kept)
    if stage == "train":
        share = 0.5 if len(together) == 4 else 1.0
        return calls.best_training_s(place, devices, rows, tokens, updates=table["updates"], share=share)
    return calls.best_scoring_s(place, devices, rows, tokens, head=role == "reference")
