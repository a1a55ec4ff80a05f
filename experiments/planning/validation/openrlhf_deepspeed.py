"""V14 and V15: OpenRLHF beside DeepSpeed-Chat, and the time of DeepSpeed-Chat's epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.fitting import fit
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.experiments.planning.validation.zero import Batch, groups_s, one_group_s, streamed_s
from async_rlhf.plan.devices import device
from async_rlhf.plan.stages import Place


def openrlhf() -> Row:
    """V14, with the planner's own efficiencies."""
    table, figures = data.published(14), []
    for number, name in enumerate(table["models"]):
        pairs = [_pair_s(number, int(length), part) for length, part in data.trials(14, "tokens", "generator_share")]
        reported = table["dschat"][number], table["openrlhf"][number]
        columns = (
            ("DeepSpeed-Chat", "s", reported[0], [slow for slow, _ in pairs]),
            ("OpenRLHF", "s", reported[1], [fast for _, fast in pairs]),
            ("gain", "", reported[0] / reported[1], [slow / fast for slow, fast in pairs]),
        )
        figures += [
            Figure(
                group=group,
                label=name.removeprefix("llama-"),
                unit=unit,
                published=published,
                predicted=found[0],
                span=(min(found), max(found)),
            )
            for group, unit, published, found in columns
        ]
    figures.sort(key=lambda each: each.group)
    gains = [figure.predicted for figure in figures if figure.group == "gain"]
    slow = [figure.ratio for figure in figures if figure.group == "DeepSpeed-Chat"]
    return data.row(
        14,
        figures,
        holds=all(1.5 <= gain <= 3 for gain in gains),
        finding=f"gains {', '.join(f'{gain:.2f}' for gain in gains)}; DeepSpeed-Chat's times are {min(slow):.2f} to "
        f"{max(slow):.2f} of the published ones where weights are gathered for every decode step",
    )


def _pair_s(number: int, tokens: int, share: float) -> tuple[float, float]:
    """DeepSpeed-Chat and OpenRLHF. share: of OpenRLHF's devices, that generate."""
    table = data.published(14)
    place = Place(model=data.model(table["models"][number]), device=device("A800"), efficiency=calls.efficiency())
    batch = Batch(rows=table["rows"], prompt=tokens, answer=tokens, updates=1)
    devices = table["devices"][number]
    return streamed_s(place, place, devices, batch), groups_s(place, place, devices, batch, share)


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
