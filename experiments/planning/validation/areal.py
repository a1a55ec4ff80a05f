"""V10 and V11: AReaL's throughput as its bound of staleness grows, and its runs beside its own synchronous system.

One constant is fitted to the throughput at bound 0, which does not tell whether a decode step is slow by its rows (a share of
the memory bandwidth) or by itself (seconds of each layer). The first is taken, and the second is an edge of the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.fitting import fit
from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.devices import device
from async_rlhf.plan.schedules import Stage, StageTime, schedule, step_time
from async_rlhf.plan.stages import Place

Times = dict[Stage, StageTime]
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
    model = data.model(name)
    reached = calls.efficiency(memory=constant) if slow == "rows" else calls.efficiency(launch_s=constant * model.layers)
    return Place(model=model, device=device("H800"), efficiency=reached)


@cache
def _step_s(bound: float, facts: Facts, constant: float) -> float:
    """V10: generators and trainers apart, weights adopted amid completions. bound: in steps; inf: none."""
    table = data.published(10)
    devices = table["nodes"] * calls.NODE
    generators = int(table["generator_share"] * devices)
    place = calls.placed(_place("qwen-1.5b", facts.slow, constant), 1, 1, generators)
    completions = calls.lengths(table["rows"], facts.mean, facts.spread, table["longest"])
    span = calls.generation_s(place, completions, table["prompt"])
    # With a bound no more rows are begun than it allows; below `alive` of them an engine has slots to spare.
    allowed = (bound + 1) * table["rows"] / generators
    begun = min(facts.alive, math.ceil(allowed)) if math.isfinite(bound) else facts.alive
    busy = min(calls.busy_s(place, completions, table["prompt"], alive=begun), span)
    tokens = round(table["prompt"] + facts.mean)
    training = calls.best_training_s(_place("qwen-1.5b"), devices - generators, table["rows"], tokens, updates=table["updates"])
    times: Times = {"generate": StageTime(busy, span), "train": StageTime(training, training)}
    return step_time(schedule("bounded" if math.isfinite(bound) else "fully_async", bound), times).seconds


def _tokens_per_s(bound: float, facts: Facts) -> float:
    return _rate(bound, facts, fitted(facts))


def _rate(bound: float, facts: Facts, constant: float) -> float:
    table = data.published(10)
    return float(table["rows"] * (table["prompt"] + facts.mean) / _step_s(bound, facts, constant))


@cache
def fitted(facts: Facts) -> float:
    """From the throughput of the synchronous bound, 0."""
    target = data.published(10)["tokens_per_s"]["none"]
    bounds = (1e-3, 1.0) if facts.slow == "rows" else (1e-7, 1e-1)
    return fit(lambda trial: [_rate(0, facts, trial[0]) / target], [bounds])[0]


@cache
def _trials() -> tuple[Facts, ...]:
    """What is assumed, then its edges, one fact at a time."""
    found = [Facts(mean, spread, int(alive)) for mean, spread, alive in data.trials(10, "mean", "spread", "alive")]
    return *found, replace(found[0], slow="steps")


def throughput() -> Row:
    """V10."""
    table = data.published(10)
    rates = {"none": 0.0, "unbounded": math.inf}
    published: dict[float, float] = {rates[name]: value for name, value in table["tokens_per_s"].items()}
    figures = []
    for bound in (*table["bounds"], math.inf):
        found = [_tokens_per_s(bound, trial) / 1e3 for trial in _trials()]
        figures.append(
            Figure(
                group="throughput",
                label=f"bound {bound}",
                unit="k tokens/s",
                published=published[bound] / 1e3 if bound in published else None,
                claim="" if bound in published else "between",
                predicted=found[0],
                how="held out" if bound else "fitted",
                span=(min(found), max(found)),
            )
        )
    gains = [_tokens_per_s(math.inf, trial) / _tokens_per_s(0, trial) for trial in _trials()]
    gain = published[math.inf] / published[0.0]
    figures.append(
        Figure(
            group="gain", label="without a bound", unit="", published=gain, predicted=gains[0], span=(min(gains), max(gains))
        )
    )
    rising = all(later.predicted >= earlier.predicted for earlier, later in pairwise(figures[:-1]))
    return data.row(
        10,
        figures,
        holds=rising and abs(gains[0] / gain - 1) <= 0.25,
        finding=f"monotone; the bound {_saturated(figures)} gives all of it" if rising else "not monotone",
        fitted=f"at the bound 0, share of the memory bandwidth in decoding: {fitted(_trials()[0]):.3f}",
    )


def _saturated(figures: list[Figure]) -> str:
    """The first bound with at least 99 % of the throughput without one."""
    most = figures[-2].predicted
    return next(figure.label.removeprefix("bound ") for figure in figures if figure.predicted >= 0.99 * most)


def end_to_end() -> Row:
    """V11: all stages on all devices in turn, against three quarters that generate and a quarter that trains."""
    table, figures, first = data.published(11), list[Figure](), _trials()[0]
    trials = [replace(first, mean=mean, spread=spread) for mean, spread in data.trials(11, "mean", "spread")]
    trials.append(replace(trials[0], slow="steps"))
    for name, nodes, (slow, fast) in zip(table["models"], table["nodes"], table["hours"], strict=True):
        gains = [_gain(name, nodes * calls.NODE, facts) for facts in trials]
        figures.append(
            Figure(
                group="gain",
                label=f"{name} on {nodes} nodes",
                unit="",
                published=slow / fast,
                predicted=gains[0],
                span=(min(gains), max(gains)),
            )
        )
    holds = all(2 <= figure.predicted <= 3 for figure in figures)
    found = ", ".join(f"{figure.predicted:.2f}" for figure in figures)
    return data.row(11, figures, holds=holds, finding=f"gains {found}", fitted="the constant of V10")


def _gain(name: str, devices: int, facts: Facts) -> float:
    table = data.published(11)
    completions = calls.lengths(table["rows"], facts.mean, facts.spread, table["longest"])
    rows, tokens = table["rows"], round(table["prompt"] + facts.mean)
    constant = fitted(next(each for each in _trials() if each.slow == facts.slow))
    generators = int(data.published(10)["generator_share"] * devices)

    def engines(count: int) -> Place:
        place = _place(name, facts.slow, constant)
        tensor = 1 if place.model.weight_bytes < _ALONE_BYTES else 2
        return calls.placed(place, tensor, 1, count // tensor)

    def train_s(count: int) -> float:
        return calls.best_training_s(_place(name), count, rows, tokens, updates=table["updates"])

    in_turns = calls.generation_s(engines(devices), completions, table["prompt"]) + train_s(devices)
    span = calls.generation_s(engines(generators), completions, table["prompt"])
    busy = min(calls.busy_s(engines(generators), completions, table["prompt"], alive=facts.alive), span)
    training = train_s(devices - generators)
    times: Times = {"generate": StageTime(busy, span), "train": StageTime(training, training)}
    return in_turns / step_time(schedule("bounded", _BOUND), times).seconds
