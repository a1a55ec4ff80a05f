"""V2 and V5: what moves between training and generation in HybridFlow, and which of its placements is fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from statistics import mean

from async_rlhf.experiments.planning.validation import data
from async_rlhf.experiments.planning.validation.calls import (
    best_generation_s,
    best_scoring_s,
    best_training_s,
    device_bytes,
    efficiency,
)
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.devices import device
from async_rlhf.plan.resharding import (
    Layout,
    Transition,
    gather_from_zero,
    gather_micro_data_parallel,
    gather_model_parallel,
)
from async_rlhf.plan.stages import Place

Stage = tuple[str, ...]


def resharding() -> Row:
    """V2: table 2 of the paper, written as it stands there, beside the floor's functions."""
    found = {"DeepSpeed-Chat": [0, 0], "HybridFlow-V": [0, 0], "HybridFlow": [0, 0]}
    for t, p, d in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3)):
        training = Layout(tensor=t, pipeline=p, data=d)
        _count(found["DeepSpeed-Chat"], gather_from_zero(training), _published(t * p * d - 1, t * p * d))
        _count(found["HybridFlow-V"], gather_model_parallel(training), _published(t * p - 1, t * p))
        for t_g, p_g in product((1, 2, 4, 8), (1, 2, 4)):
            if t % t_g == 0 and p % p_g == 0:
                held = t_g * p_g
                expected = Transition(
                    received=Fraction(t * p - held, held * t * p), peak=Fraction(1, held), redundant=Fraction(0)
                )
                reached = gather_micro_data_parallel(training, Layout(tensor=t_g, pipeline=p_g))
                _count(found["HybridFlow"], reached, expected)
    figures = [
        Figure(group="layouts equal", label=name, unit="", published=many, predicted=equal, how="exact")
        for name, (equal, many) in found.items()
    ]
    moved = data.model("llama-70b").weight_bytes / 1e9
    paper = data.published(2)["bytes_70b"] / 1e9
    figures.append(Figure(group="weights of 70B", label="", unit="GB", published=paper, predicted=moved, how="held out"))
    return data.row(
        2,
        figures,
        holds=all(equal == many for equal, many in found.values()),
        finding="equal as fractions; tests/plan counts the same volumes on numbered shards",
    )


def _published(received: int, parts: int) -> Transition:
    """(n - 1) / n of the weights arrive, all of them are held, a part of 1 / n twice."""
    return Transition(received=Fraction(received, parts), peak=Fraction(1), redundant=Fraction(1, parts))


def _count(counts: list[int], reached: Transition, expected: Transition) -> None:
    counts[0] += reached == expected
    counts[1] += 1


# Models of each set, with the sets' shares of the devices: as one, actor and reference apart from critic and reward model, each
# apart, and the actor apart from the rest (HybridFlow's colocate, split, standalone and a division that it also searches).
_MODELS = ("actor", "reference", "critic", "reward")
_PLACEMENTS: dict[str, tuple[Stage, ...]] = {
    "colocated": (_MODELS,),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": tuple((model,) for model in _MODELS),
}
_SHARES = {1: ((1.0,),), 2: ((0.5, 0.5), (0.75, 0.25)), 4: ((0.25,) * 4, (0.5, 0.125, 0.25, 0.125), (0.5, 0.125, 0.125, 0.25))}


def placements() -> Row:
    """V5: for each size and number of devices, the fastest division against everything on all devices."""
    table = data.published(5)
    figures, early, late = [], 0, 0
    for name, devices in product(table["models"], table["devices"]):
        steps = {placement: min(_steps(name, devices, sets)) for placement, sets in _PLACEMENTS.items()}
        best = min(steps, key=steps.__getitem__)
        if math.isinf(steps["colocated"]):
            continue
        lead = min(steps["split"], steps["standalone"]) / steps["colocated"]
        early += best != "colocated" and devices <= 64
        late += best != "colocated" and devices >= 96
        if math.isfinite(lead):
            label = f"{name.removeprefix('llama-')} on {devices}: {best}"
            group = "divided / colocated, " + ("up to 64" if devices <= 64 else "96 to 128")
            claim = "above 1" if devices <= 64 else "some below 1"
            figures.append(Figure(group=group, label=label, unit="", published=None, claim=claim, predicted=lead))
    figures.sort(key=lambda each: each.group, reverse=True)
    means = [mean(each.predicted for each in figures if f" {devices}:" in each.label) for devices in (16, 128)]
    finding = (
        f"a division wins in {early} cases up to 64 devices and in {late} at 96 and 128; the best one takes {means[0]:.2f} "
        f"times as long on 16 devices in the mean, {means[1]:.2f} times on 128"
    )
    return data.row(5, figures, holds=early == 0 and late > 0, finding=finding)


def _steps(name: str, devices: int, sets: tuple[Stage, ...]) -> Iterator[float]:
    for shares in _SHARES[len(sets)]:
        counts = [int(share * devices) for share in shares]
        yield sum(
            max(_stage_s(name, stage, models, count) for models, count in zip(sets, counts, strict=True)) for stage in _CALLS
        )


_CALLS = {"generate": ("actor",), "score": ("reference", "critic", "reward"), "train": ("actor", "critic")}


def _stage_s(name: str, stage: str, models: Stage, devices: int) -> float:
    """Calls of a set follow each other; sets work at the same time."""
    return sum(
        _call_s(name, stage, model, len(models), devices, _kept(name, models, devices))
        for model in models
        if model in _CALLS[stage]
    )


def _kept(name: str, models: Stage, devices: int) -> float:
    """Bytes of a device for the models of its set, each divided over all its devices."""
    model = data.model(name)
    return sum(device_bytes(model, devices, trained=each in _CALLS["train"]) for each in models)


def _call_s(name: str, stage: str, role: str, together: int, devices: int, kept: float) -> float:
    table = data.published(5)
    place = Place(model=data.model(name), device=device("A100-80GB"), efficiency=efficiency())
    rows, tokens = table["rows"], table["prompt"] + table["answer"]
    if kept > 0.85 * place.device.memory_bytes:
        return math.inf
    if stage == "generate":
        return best_generation_s(place, devices, (table["answer"],) * rows, table["prompt"], kept_bytes=kept)
    if stage == "train":
        return best_training_s(place, devices, rows, tokens, updates=table["updates"], share=0.5 if together == 4 else 1.0)
    return best_scoring_s(place, devices, rows, tokens, head=role == "reference")
