"""V14 and V15: OpenRLHF beside DeepSpeed-Chat, and the time of DeepSpeed-Chat's epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.fitting import fit
from async_rlhf.experiments.planning.validation.rows import Figure, How, Row
from async_rlhf.experiments.planning.validation.zero import Batch, groups_s, one_group_s
from async_rlhf.plan.devices import device
from async_rlhf.plan.stages import Place

_STEP: dict[str, Callable[[Place, Place, int, Batch], float]] = {
    "dschat": one_group_s,
    "openrlhf": partial(groups_s, share=0.25),
}
_PICKS: tuple[tuple[str, str, Callable[[Mapping[str, float]], float]], ...] = (
    ("DeepSpeed-Chat", "s", lambda found: found["dschat"]),
    ("OpenRLHF", "s", lambda found: found["openrlhf"]),
    ("gain", "", lambda found: found["dschat"] / found["openrlhf"]),
)
_FIRST = 0  # the row on which the constants of V14 are fitted


def _pair_s(system: str, number: int, tokens: int, decode: float) -> float:
    """decode: reached share of the memory bandwidth in generation."""
    table = data.published(14)
    place = Place(model=data.model(table["models"][number]), device=device("A800"), efficiency=calls.efficiency(memory=decode))
    batch = Batch(rows=table["rows"], prompt=tokens, answer=tokens, updates=1)
    return _STEP[system](place, place, table["devices"][number], batch)


@cache
def _share(system: str, tokens: int) -> float:
    """From the 7B row."""
    target = data.published(14)[system][_FIRST]
    return fit(lambda trial: [_pair_s(system, _FIRST, tokens, trial[0]) / target], [(1e-3, 1.0)])[0]


def openrlhf() -> Row:
    """V14."""
    table, assumed = data.published(14), data.assumed(14, "tokens")
    figures = []
    for number, name in enumerate(table["models"]):
        steps = {
            tokens: {system: _pair_s(system, number, tokens, _share(system, tokens)) for system in _STEP}
            for tokens in {int(assumed.value), int(assumed.low), int(assumed.high)}
        }
        how: How = "fitted" if number == _FIRST else "held out"
        for group, unit, pick in _PICKS:
            values = [pick(found) for found in steps.values()]
            figures.append(
                Figure(
                    group=group,
                    label=name.removeprefix("llama-"),
                    unit=unit,
                    published=pick({system: table[system][number] for system in _STEP}),
                    predicted=pick(steps[int(assumed.value)]),
                    how=how,
                    span=(min(values), max(values)),
                )
            )
    figures.sort(key=lambda each: (each.group, each.how))
    gains = [figure.predicted for figure in figures if figure.group == "gain" and figure.how == "held out"]
    fitted = ", ".join(f"{data.published(4)['names'][system]} {_share(system, int(assumed.value)):.3f}" for system in _STEP)
    return data.row(
        14,
        figures,
        holds=all(1.5 <= gain <= 3 for gain in gains),
        finding=f"held-out gains {min(gains):.2f} to {max(gains):.2f}",
        fitted=f"on the 7B row, share of the memory bandwidth in generation: {fitted}",
    )


def epoch_hours(machine: Mapping[str, Any], name: str, decode: float, thousands: float) -> float:
    """decode: reached share of the memory bandwidth in generation."""
    table = data.published(15)
    chip = device(machine["device"])
    actor, critic = (
        Place(model=data.model(each), device=chip, efficiency=calls.efficiency(memory=decode)) for each in (name, "opt-350m")
    )
    batch = Batch(rows=table["rows"], prompt=table["tokens"], answer=table["tokens"], updates=1)
    return thousands * 1000 / batch.rows * one_group_s(actor, critic, machine["devices"], batch) / 3600


@cache
def decode_share(thousands: float) -> float:
    """One constant, from the five models on 8 A100-80GB."""
    table = data.published(15)
    machine = table["machine"][0]

    def ratios(trial: Sequence[float]) -> list[float]:
        cells = [(name, hours) for name, hours in zip(table["models"], machine["hours"], strict=True) if hours]
        return [epoch_hours(machine, name, trial[0], thousands) / hours for name, hours in cells]

    return fit(ratios, [(0.001, 1.0)])[0]


def epochs() -> Row:
    """V15."""
    table, reading = data.published(15), data.assumed(15, "thousand_queries")
    figures = []
    for number, machine in enumerate(table["machine"]):
        group = f"{machine['devices']} {machine['device']}"
        for name, hours in zip(table["models"], machine["hours"], strict=True):
            if not hours:
                continue
            both = tuple(epoch_hours(machine, name, decode_share(each), each) for each in reading.range)
            predicted = epoch_hours(machine, name, decode_share(reading.value), reading.value)
            if math.isinf(predicted):
                continue
            figures.append(
                Figure(
                    group=group,
                    label=name,
                    unit="h",
                    published=hours,
                    predicted=predicted,
                    how="held out" if number else "fitted",
                    span=(min(both), max(both)),
                )
            )
    near = sum(0.5 <= figure.ratio <= 2 for figure in figures)
    held = [0.5 <= figure.ratio <= 2 for figure in figures if figure.how == "held out"]
    shares = ", ".join(f"{decode_share(each):.3f} with {each:g} thousand queries" for each in reading.range)
    return data.row(
        15,
        figures,
        holds=near == len(figures),
        finding=f"{near} of {len(figures)} rows within 2 times, {sum(held)} of {len(held)} held out",
        fitted=f"on 8 A100-80GB, share of the memory bandwidth in generation: {shares}",
    )
