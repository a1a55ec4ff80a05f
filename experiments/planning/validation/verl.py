"""V6 to V9: verl's synchronous, one-step-off and fully asynchronous trainers, DAPO with Qwen2.5-Math-7B on H20.

What the runs do not state is taken from the parts of one step: the mean length from its update (at an efficiency that is
assumed), that of inference from its pass of log-probabilities, the time of a decode step from its generation. Everything else
is predicted: other numbers of devices, and every asynchronous step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

from async_rlhf.experiments.planning.validation import calls, data
from async_rlhf.experiments.planning.validation.rows import Figure, How, Row, within
from async_rlhf.experiments.planning.validation.windows import window_s
from async_rlhf.plan.balance import most_loaded
from async_rlhf.plan.devices import device
from async_rlhf.plan.stages import Place, decode_step_s

_SAMPLE = 8  # of so many rows and engines one is simulated
_LEAST_STEP_S = 1e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on so many devices. engine: devices of one engine; group: devices that share a row in training."""

    rows: int
    prompt: int
    longest: int
    updates: int
    spread: float
    engine: int
    group: int
    samples: int = 16
    """Completions of a prompt."""
    mean: float = 0.0
    launch_s: float = 0.0
    inference: float = 1.0
    training: float = 1.0
    """Share of the arithmetic peak, where devices take turns; `dedicated`: where they only train."""
    dedicated: float = 0.0
    other_s: float = 0.0

    @property
    def completions(self) -> tuple[int, ...]:
        return calls.lengths(self.rows, self.mean, self.spread, self.longest)

    def place(self, tensor: int, devices: int) -> Place:
        efficiency = calls.efficiency(calls.DEFAULTS.inference, launch_s=self.launch_s)
        place = Place(model=data.model("qwen-7b"), device=device("H20"), efficiency=efficiency)
        return calls.placed(place, tensor, 1, devices // tensor)

    def generation_s(self, devices: int) -> float:
        return calls.generation_s(self.place(self.engine, devices), self.completions, self.prompt)

    def old_s(self, devices: int) -> float:
        """A forward pass over the batch, shared out evenly."""
        return sum(self._costs) / (devices * device("H20").peak_flops * self.inference)

    def update_s(self, devices: int, share: float) -> float:
        """share: of the peak. Forward, backward, recomputation: each update ends with its most loaded group, and FSDP gathers
        the weights twice and reduces the gradients once in it."""
        part, ranks, costs = self.rows // self.updates, devices // self.group, self._costs
        loads = sum(most_loaded(costs[at : at + part], ranks) for at in range(0, self.rows, part))
        return 4 * loads / (self.group * device("H20").peak_flops * share) + self._moved_s(devices)

    def _moved_s(self, devices: int) -> float:
        place = self.place(1, devices)
        return 3 * self.updates * place.far.gather_s(place.model.weight_bytes, devices)

    def trained_share(self, devices: int, seconds: float) -> float:
        """Of the peak, with which an update takes so long."""
        moved = self._moved_s(devices)
        return (self.update_s(devices, 1.0) - moved) / (seconds - moved)

    @property
    def _costs(self) -> list[float]:
        return [_row_flops(self.prompt + each) for each in self.completions]

    def window_s(self, generators: int, trainers: int, threshold: float) -> float:
        engines = generators / self.engine / _SAMPLE
        place = self.place(self.engine, self.engine)

        def step_s(alive: float, produced: float) -> float:
            return decode_step_s(place, math.ceil(alive / engines), self.prompt + produced)

        return window_s(
            _sample(self.completions),
            group=self.samples,
            threshold=threshold,
            most_alive=int(256 * engines),
            step_s=step_s,
            update_s=self.update_s(trainers, self.dedicated),
        )


@cache
def _sample(completions: tuple[int, ...]) -> list[int]:
    """One of so many, by length, so that the longest is among them: a window may wait for it."""
    found = sorted(completions, reverse=True)[::_SAMPLE]
    random.Random(0).shuffle(found)
    return found


@cache
def _row_flops(tokens: int) -> float:
    return data.model("qwen-7b").sequence_flops(tokens)


def _fitted(case: Case, devices: int, parts: tuple[float, float, float], trainers: int, update_s: float, share: float) -> Case:
    """parts: generation, log-probabilities and update of a synchronous step. update_s: of `trainers` devices at `share` of the
    peak, from which the mean length follows."""
    gen_s, old_s, turns_s = parts
    few = replace(case, rows=1024, mean=1000.0)
    for _ in range(4):
        moved = few._moved_s(trainers)
        even = 4 * sum(few._costs) * case.rows / few.rows / (trainers * device("H20").peak_flops * share)
        few = replace(few, mean=round(min(few.mean * (update_s - moved) / even, 0.9 * case.longest)))
    case = replace(case, mean=few.mean)
    # Generation is linear in what a step takes besides.
    without, second = (replace(case, launch_s=each).generation_s(devices) for each in (0.0, 1.0))
    return replace(
        case,
        launch_s=max((gen_s - without) / (second - without), _LEAST_STEP_S),
        inference=case.old_s(devices) / old_s,
        training=case.trained_share(devices, turns_s),
    )


def _stated(case: Case) -> str:
    turns = f"{case.training:.2f} in training in turns"
    alone = f", {case.dedicated:.2f} on devices of its own" if case.dedicated else ""
    return (
        f"mean length {case.mean:.0f}, decode step + {case.launch_s * 1e3:.1f} ms, {case.inference:.2f} of the peak in "
        f"inference, {turns}{alone}"
    )


def one_step_off() -> Row:
    """V6."""
    figures, stated, bounds = [], [], []
    for name, label in (("fsdp2", "FSDP2, 20k"), ("megatron", "Megatron, 8k")):
        facts = data.trials(6, "spread", "engine_tensor", "training")
        trials = [_one_step(name, spread, int(engine), share) for spread, engine, share in facts]
        found = trials[0]
        figures += [
            replace(figure, label=label, span=_edges([each[1][number].predicted for each in trials]))
            for number, figure in enumerate(found[1])
        ]
        stated.append(f"{label}: {_stated(found[0])}")
        generation = found[1][0].predicted
        rest_s = _other_s(name)
        bounds.append(f"{label}: {'generation' if found[1][1].predicted <= generation + rest_s else 'training'}")
    figures.sort(key=lambda each: each.group)
    gains = [figure for figure in figures if figure.group.startswith("gain")]
    finding = f"what the step waits for: {'; '.join(bounds)}"
    return data.row(6, figures, holds=within(gains, 0.15), finding=finding, fitted="; ".join(stated) + " (synchronous parts)")


def _other_s(name: str) -> float:
    """Of a synchronous step, what is neither generation, log-probabilities nor update."""
    parts: dict[str, float] = data.published(6)["synchronous"][name]
    return parts["step"] - parts["gen"] - parts["old"] - parts["update"]


@cache
def _one_step(name: str, spread: float, engine: int, share: float) -> tuple[Case, list[Figure]]:
    table: dict[str, Any] = data.published(6)
    synchronous, asynchronous = table["synchronous"][name], table["one_step"][name]
    case = Case(
        rows=table["rows"],
        prompt=table["prompt"],
        longest=table["longest"][name],
        updates=table["updates"],
        spread=spread,
        engine=engine,
        group=4,
    )
    parts = (synchronous["decode"], synchronous["old"], synchronous["update"])
    case = _fitted(case, 16, parts, 16, synchronous["update"], share)
    generation, training = case.generation_s(4), case.old_s(12) + case.update_s(12, case.training)
    step = max(generation, training) + _other_s(name)
    gain = synchronous["step"] / asynchronous["step"]
    return case, [
        Figure(group="generation on 4", label="", unit="s", published=asynchronous["decode"], predicted=generation),
        Figure(group="step 4 + 12", label="", unit="s", published=asynchronous["step"], predicted=step),
        Figure(group="gain", label="", unit="", published=gain, predicted=synchronous["step"] / step),
    ]


def _edges(values: list[float]) -> tuple[float, ...]:
    return min(values), max(values)


_FITTED_ON = 64


@cache
def fully_async_case(spread: float, group: int, share: float) -> Case:
    """Fitted to the pair of 64 devices: the parts of its synchronous step, and the update of 32 devices that only train."""
    table = data.published(7)
    at = table["devices"].index(_FITTED_ON)
    case = Case(
        rows=table["rows"],
        prompt=table["prompt"],
        longest=table["longest"],
        updates=table["updates"],
        spread=spread,
        engine=2,
        group=group,
    )
    parts = (table["gen"][at], table["old"][at], table["update"][at])
    half = _FITTED_ON // 2
    case = _fitted(case, _FITTED_ON, parts, half, table["async_update"][at], share)
    other_s = table["step"][at] - table["gen"][at] - table["old"][at] - table["update"][at]
    return replace(case, dedicated=case.trained_share(half, table["async_update"][at]), other_s=other_s)


def _synchronous_s(case: Case, devices: int) -> float:
    return case.generation_s(devices) + case.old_s(devices) + case.update_s(devices, case.training) + case.other_s


@cache
def _window_s(case: Case, devices: int, threshold: float) -> float:
    return case.window_s(devices // 2, devices // 2, threshold)


_FACTS = ("spread", "sequence_parallel", "training")


def _over_range(predict: Callable[[Case], float]) -> tuple[float, tuple[float, ...]]:
    """The prediction, and its edges over what is assumed."""
    found = [predict(_case(facts)) for facts in data.trials(7, *_FACTS)]
    return found[0], _edges(found)


def _case(facts: Sequence[float]) -> Case:
    return fully_async_case(facts[0], int(facts[1]), facts[2])


def fully_async() -> Row:
    """V7."""
    table, figures = data.published(7), []
    columns = zip(table["devices"], table["step"], table["async_step"], table["gain"], strict=True)
    for devices, slow, fast, gain in columns:
        figures += [
            _seven("synchronous step", devices, "s", slow, partial(_synchronous_s, devices=devices)),
            _seven("asynchronous step", devices, "s", fast, partial(_asynchronous_s, devices=devices)),
            _seven("gain", devices, "", gain, partial(_async_gain, devices=devices)),
        ]
    figures.sort(key=lambda each: (each.group == "gain", each.group, each.how))
    by_name = {(figure.group, figure.label): figure.predicted for figure in figures}
    flat = by_name["synchronous step", "128 devices"] / by_name["synchronous step", "64 devices"]
    gains = [by_name["gain", f"{devices} devices"] for devices in table["devices"]]
    return data.row(
        7,
        figures,
        holds=all(1.6 <= gain <= 2.8 for gain in gains) and abs(flat - 1) <= 0.15,
        finding=f"gains {', '.join(f'{gain:.2f}' for gain in gains)}; the synchronous step on 128 devices is {flat:.2f} "
        "of that on 64 (published 0.98)",
        fitted=f"on 64 devices: {_stated(_case(data.trials(7, *_FACTS)[0]))}",
    )


def _seven(group: str, devices: int, unit: str, published: float, predict: Callable[[Case], float]) -> Figure:
    predicted, span = _over_range(predict)
    how: How = "fitted" if devices == _FITTED_ON else "held out"
    label = f"{devices} devices"
    return Figure(group=group, label=label, unit=unit, published=published, predicted=predicted, how=how, span=span)


def _asynchronous_s(case: Case, devices: int) -> float:
    return _window_s(case, devices, data.published(7)["threshold"])


def _async_gain(case: Case, devices: int) -> float:
    return _synchronous_s(case, devices) / _asynchronous_s(case, devices)


def modes() -> Row:
    """V8."""
    published = data.published(8)["step"]
    predict: dict[str, Callable[[Case], float]] = {
        "synchronous": partial(_synchronous_s, devices=128),
        "stream": partial(_window_s, devices=128, threshold=0.0),
        "partial": partial(_asynchronous_s, devices=128),
    }
    figures, steps = [], {}
    for name, seconds in published.items():
        steps[name], span = _over_range(predict[name])
        figures.append(Figure(group="step", label=name, unit="s", published=seconds, predicted=steps[name], span=span))
    gains = [
        Figure(
            group="gain over synchronous",
            label=name,
            unit="",
            published=published["synchronous"] / published[name],
            predicted=steps["synchronous"] / steps[name],
        )
        for name in ("stream", "partial")
    ]
    order = steps["synchronous"] > steps["stream"] > steps["partial"]
    finding = "the order is as published" if order else "the order is another than published"
    return data.row(8, [*figures, *gains], holds=order and within(gains, 0.2), finding=finding, fitted="as V7: on 64 devices")


def thresholds() -> Row:
    """V9."""
    table, figures = data.published(9), []
    for threshold, seconds in zip(table["thresholds"], table["step"], strict=True):
        predicted, span = _over_range(partial(_window_s, devices=128, threshold=threshold))
        figures.append(
            Figure(group="step", label=f"threshold {threshold:g}", unit="s", published=seconds, predicted=predicted, span=span)
        )
    steps = [figure.predicted for figure in figures]
    falls = all(later <= earlier for earlier, later in pairwise(steps[:3]))
    saturated = abs(steps[3] / steps[2] - 1) <= 0.1
    share = (steps[0] - steps[1]) / (steps[0] - steps[2]) if steps[0] > steps[2] else 0.0
    finding = f"the threshold 0.1 gives {share:.0%} of what 0.3 gives (published 70 %)"
    return data.row(9, figures, holds=falls and saturated, finding=finding, fitted="as V7: on 64 devices")
