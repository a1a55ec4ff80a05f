"""V10 and V11: AReaL's throughput as its bound of staleness grows, and its runs beside its own synchronous system.

One constant is fitted to the throughput at bound 0, which leaves open whether a decode step is slow by its rows (a share of
the memory bandwidth) or by itself (seconds of each layer). The first is taken, and the second is an edge of the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.schedules import StageTime, schedule, step_time
from async_rlhf.experiments.planning.model.stages import Place
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import Row, model, published, row, spanned, trials

_ALONE_BYTES = 20e9  # weights up to which one device generates by itself
_BOUND = 4  # of AReaL's runs of code; those of maths have 8


@dataclass(frozen=True)
class Facts:
    """What is assumed. slow: by what decoding is slow."""

    mean: float
    spread: float
    alive: int
    slow: Literal["rows", "steps"] = "rows"


def _place(name: str, slow: str = "rows", constant: float = 1.0) -> Place:
    reached = calls.efficiency(memory=constant) if slow == "rows" else calls.efficiency(launch_s=constant * model(name).layers)
    return Place(model=model(name), device=device("H800"), efficiency=reached)


def _apart_s(bound: float, generate: StageTime, training: float) -> float:
    """A step of generators and trainers apart, weights adopted amid completions. bound: in steps; inf: none."""
    named = schedule("bounded" if math.isfinite(bound) else "fully_async", bound)
    return step_time(named, {"generate": generate, "train": StageTime(training, training)}).seconds


@cache
def _rate(bound: float, facts: Facts, constant: float) -> float:
    """V10: tokens a second."""
    table = published(10)
    devices, prompt, rows = table["nodes"] * calls.NODE, table["prompt"], table["rows"]
    generators = int(table["generator_share"] * devices)
    place = calls.placed(_place("qwen-1.5b", facts.slow, constant), 1, 1, generators)
    completions = calls.lengths(rows, facts.mean, facts.spread, table["longest"])
    span = calls.generation_s(place, completions, prompt)
    # With a bound no more rows are begun than it allows; below `alive` of them an engine has slots to spare.
    begun = min(facts.alive, math.ceil((bound + 1) * rows / generators)) if math.isfinite(bound) else facts.alive
    busy = min(calls.busy_s(place, completions, prompt, alive=begun), span)
    training = calls.best_training_s(
        _place("qwen-1.5b"), devices - generators, rows, round(prompt + facts.mean), updates=table["updates"]
    )
    return float(rows * (prompt + facts.mean) / _apart_s(bound, StageTime(busy, span), training))


@cache
def fitted(facts: Facts) -> float:
    """From the throughput of the synchronous bound, 0."""
    target = published(10)["tokens_per_s"]["none"]
    bounds = (1e-3, 1.0) if facts.slow == "rows" else (1e-7, 1e-1)
    return calls.fit(lambda trial: [_rate(0, facts, trial[0]) / target], [bounds])[0]


@cache
def _trials() -> tuple[Facts, ...]:
    """What is assumed, then its edges, one fact at a time."""
    found = [Facts(mean, spread, int(alive)) for mean, spread, alive in trials(10, "mean", "spread", "alive")]
    return *found, replace(found[0], slow="steps")


def throughput() -> Row:
    """V10."""
    table = published(10)
    given: dict[float, float] = {0.0: table["tokens_per_s"]["none"], math.inf: table["tokens_per_s"]["unbounded"]}
    rates = {bound: [_rate(bound, each, fitted(each)) for each in _trials()] for bound in (*table["bounds"], math.inf)}
    figures = [
        spanned(
            "throughput",
            f"bound {bound}",
            "k tokens/s",
            given[bound] / 1e3 if bound in given else None,
            [each / 1e3 for each in found],
            "held out" if bound else "fitted",
            claim="" if bound in given else "between",
        )
        for bound, found in rates.items()
    ]
    gain, gains = given[math.inf] / given[0.0], [most / least for most, least in zip(rates[math.inf], rates[0], strict=True)]
    rising = all(later.predicted >= earlier.predicted for earlier, later in pairwise(figures))
    enough = next(each.label.removeprefix("bound ") for each in figures if each.predicted >= 0.99 * figures[-1].predicted)
    return row(
        10,
        [*figures, spanned("gain", "without a bound", "", gain, gains)],
        holds=rising and abs(gains[0] / gain - 1) <= 0.25,
        finding=f"monotone; the bound {enough} gives all of it" if rising else "not monotone",
        fitted=f"at the bound 0, share of the memory bandwidth in decoding: {fitted(_trials()[0]):.3f}",
    )


def end_to_end() -> Row:
    """V11: all stages on all devices in turn, against three quarters that generate and a quarter that trains."""
    table, first = published(11), _trials()[0]
    facts = [replace(first, mean=mean, spread=spread) for mean, spread in trials(11, "mean", "spread")]
    facts.append(replace(facts[0], slow="steps"))
    figures = [
        spanned("gain", f"{name} on {nodes} nodes", "", slow / fast, [_gain(name, nodes * calls.NODE, each) for each in facts])
        for name, nodes, (slow, fast) in zip(table["models"], table["nodes"], table["hours"], strict=True)
    ]
    holds = all(2 <= figure.predicted <= 3 for figure in figures)
    found = ", ".join(f"{figure.predicted:.2f}" for figure in figures)
    return row(11, figures, holds=holds, finding=f"gains {found}", fitted="the constant of V10")


def _gain(name: str, devices: int, facts: Facts) -> float:
    table = published(11)
    completions = calls.lengths(table["rows"], facts.mean, facts.spread, table["longest"])
    rows, prompt, tokens = table["rows"], table["prompt"], round(table["prompt"] + facts.mean)
    place = _place(name, facts.slow, fitted(next(each for each in _trials() if each.slow == facts.slow)))
    generators, tensor = int(published(10)["generator_share"] * devices), 1 if place.model.weight_bytes < _ALONE_BYTES else 2
    on_all, on_some = (calls.placed(place, tensor, 1, count // tensor) for count in (devices, generators))
    training, apart = (
        calls.best_training_s(_place(name), count, rows, tokens, updates=table["updates"])
        for count in (devices, devices - generators)
    )
    span = calls.generation_s(on_some, completions, prompt)
    busy = min(calls.busy_s(on_some, completions, prompt, alive=facts.alive), span)
    in_turns = calls.generation_s(on_all, completions, prompt) + training
    return in_turns / _apart_s(_BOUND, StageTime(busy, span), apart)
