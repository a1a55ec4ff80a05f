"""V14 and V15: OpenRLHF beside DeepSpeed-Chat, and the time of DeepSpeed-Chat's epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.stages import Place
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import Figure, How, Row, edges, model, published, row, spanned, trials
from async_rlhf.experiments.planning.validation.zero import Batch, groups_s, one_group_s, streamed_s


def openrlhf() -> Row:
    """V14, with the planner's own efficiencies."""
    table, figures = published(14), list[Figure]()
    for number, name in enumerate(table["models"]):
        found = [_pair_s(number, int(length), part) for length, part in trials(14, "tokens", "generator_share")]
        label, (slow, fast) = name.removeprefix("llama-"), (table["dschat"][number], table["openrlhf"][number])
        figures += [
            spanned("DeepSpeed-Chat", label, "s", slow, [each for each, _ in found]),
            spanned("OpenRLHF", label, "s", fast, [each for _, each in found]),
            spanned("gain", label, "", slow / fast, [one / other for one, other in found]),
        ]
    figures.sort(key=lambda each: each.group)
    gains = [figure.predicted for figure in figures if figure.group == "gain"]
    slowest = [figure.ratio for figure in figures if figure.group == "DeepSpeed-Chat"]
    return row(
        14,
        figures,
        holds=all(1.5 <= gain <= 3 for gain in gains),
        finding=f"gains {', '.join(f'{gain:.2f}' for gain in gains)}; DeepSpeed-Chat's times are {min(slowest):.2f} to "
        f"{max(slowest):.2f} of the published ones where weights are gathered for every decode step",
    )


def _pair_s(number: int, tokens: int, share: float) -> tuple[float, float]:
    """DeepSpeed-Chat and OpenRLHF. share: of OpenRLHF's devices, that generate."""
    table = published(14)
    place = Place(model=model(table["models"][number]), device=device("A800"), efficiency=calls.efficiency())
    batch, devices = Batch(rows=table["rows"], prompt=tokens, answer=tokens, updates=1), table["devices"][number]
    return streamed_s(place, place, devices, batch), groups_s(place, place, devices, batch, share)


def epochs() -> Row:
    """V15: one constant, from the five models on 8 A100-80GB, for each reading of the number of queries."""
    table, figures = published(15), []
    taken, readings = table["assumed"]["thousand_queries"]["value"], edges(15, "thousand_queries")
    for number, machine in enumerate(table["machine"]):
        for name, hours in zip(table["models"], machine["hours"], strict=True):
            if not hours:
                continue
            found = {each: _epoch_hours(machine, name, _decode_share(each), each) for each in {taken, *readings}}
            if math.isfinite(found[taken]):
                how: How = "held out" if number else "fitted"
                span = min(found[each] for each in readings), max(found[each] for each in readings)
                figures.append(Figure(f"{machine['devices']} {machine['device']}", name, "h", hours, found[taken], how, span))
    near = [0.5 <= figure.ratio <= 2 for figure in figures]
    held = [0.5 <= figure.ratio <= 2 for figure in figures if figure.how == "held out"]
    shares = ", ".join(f"{_decode_share(each):.3f} with {each:g} thousand queries" for each in readings)
    return row(
        15,
        figures,
        holds=all(near),
        finding=f"{sum(near)} of {len(figures)} rows within 2 times, {sum(held)} of {len(held)} held out",
        fitted=f"on 8 A100-80GB, share of the memory bandwidth in generation: {shares}",
    )


def _epoch_hours(machine: Mapping[str, Any], name: str, decode: float, thousands: float) -> float:
    """decode: reached share of the memory bandwidth in generation."""
    table = published(15)
    chip, efficiency = device(machine["device"]), calls.efficiency(memory=decode)
    actor, critic = (Place(model=model(each), device=chip, efficiency=efficiency) for each in (name, "opt-350m"))
    batch = Batch(rows=table["rows"], prompt=table["tokens"], answer=table["tokens"], updates=1)
    return thousands * 1000 / batch.rows * one_group_s(actor, critic, machine["devices"], batch) / 3600


@cache
def _decode_share(thousands: float) -> float:
    table = published(15)
    machine = table["machine"][0]
    cells = [(name, hours) for name, hours in zip(table["models"], machine["hours"], strict=True) if hours]
    return calls.fit(
        lambda trial: [_epoch_hours(machine, name, trial[0], thousands) / hours for name, hours in cells], [(0.001, 1.0)]
    )[0]
