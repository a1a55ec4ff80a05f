"""V6 to V9: verl's synchronous, one-step-off and fully asynchronous trainers, DAPO with Qwen2.5-Math-7B on H20.

What the runs do not state is taken from the parts of one step: the mean length from its update (at an efficiency that is
assumed), that of inference from its pass of log-probabilities, the time of a decode step from its generation. Everything else
is predicted: other numbers of devices, and every asynchronous step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.stages import Place, decode_step_s
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import Figure, How, Row, model, published, row, spanned, trials, within
from async_rlhf.experiments.planning.validation.windows import window_s

_SAMPLE = 8  # of so many rows and engines one is simulated
_LEAST_STEP_S = 1e-4
_FITTED_ON = 64  # devices, of V7 to V9


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on so many devices. engine: devices of one engine; group: devices that share a row in training; samples:
    completions of a prompt. Shares of the arithmetic peak: inference; training, where devices take turns; dedicated, where they
    only train."""

    rows: int
    prompt: int
    longest: int
    updates: int
    spread: float
    engine: int
    group: int
    samples: int = 16
    mean: float = 0.0
    launch_s: float = 0.0
    inference: float = 1.0
    training: float = 1.0
    dedicated: float = 0.0
    other_s: float = 0.0

    @property
    def completions(self) -> tuple[int, ...]:
        return calls.lengths(self.rows, self.mean, self.spread, self.longest)

    def place(self, tensor: int, devices: int) -> Place:
        efficiency = calls.efficiency(calls.DEFAULTS.inference, launch_s=self.launch_s)
        place = Place(model=model("qwen-7b"), device=device("H20"), efficiency=efficiency)
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
        loads = sum(calls.most_loaded(costs[at : at + part], ranks) for at in range(0, self.rows, part))
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

    def step_s(self, devices: int) -> float:
        """Synchronous."""
        return self.generation_s(devices) + self.old_s(devices) + self.update_s(devices, self.training) + self.other_s

    def fitted(self, devices: int, parts: tuple[float, float, float], trainers: int, update_s: float, share: float) -> Case:
        """parts: generation, log-probabilities and update of a synchronous step. update_s: of `trainers` devices at `share` of
        the peak, from which the mean length follows."""
        gen_s, old_s, turns_s = parts
        few = replace(self, rows=1024, mean=1000.0)
        for _ in range(4):
            moved = few._moved_s(trainers)
            even = 4 * sum(few._costs) * self.rows / few.rows / (trainers * device("H20").peak_flops * share)
            few = replace(few, mean=round(min(few.mean * (update_s - moved) / even, 0.9 * self.longest)))
        case = replace(self, mean=few.mean)
        # Generation is linear in what a step takes besides.
        without, second = (replace(case, launch_s=each).generation_s(devices) for each in (0.0, 1.0))
        return replace(
            case,
            launch_s=max((gen_s - without) / (second - without), _LEAST_STEP_S),
            inference=case.old_s(devices) / old_s,
            training=case.trained_share(devices, turns_s),
        )

    def __str__(self) -> str:
        alone = f", {self.dedicated:.2f} on devices of its own" if self.dedicated else ""
        return (
            f"mean length {self.mean:.0f}, decode step + {self.launch_s * 1e3:.1f} ms, {self.inference:.2f} of the peak in "
            f"inference, {self.training:.2f} in training in turns{alone}"
        )


@cache
def _window_s(case: Case, devices: int, threshold: float) -> float:
    """Half of the devices generate, half train."""
    half = devices // 2
    engines = half / case.engine / _SAMPLE
    place = case.place(case.engine, case.engine)
    # One row of so many, by length, so that the longest is among them: a window may wait for it.
    sample = sorted(case.completions, reverse=True)[::_SAMPLE]
    random.Random(0).shuffle(sample)
    return window_s(
        sample,
        group=case.samples,
        threshold=threshold,
        most_alive=int(256 * engines),
        step_s=lambda alive, produced: decode_step_s(place, math.ceil(alive / engines), case.prompt + produced),
        update_s=case.update_s(half, case.dedicated),
    )


@cache
def _row_flops(tokens: int) -> float:
    return model("qwen-7b").sequence_flops(tokens)


def one_step_off() -> Row:
    """V6: four devices generate, twelve train."""
    figures, stated, bounds, table = list[Figure](), [], [], published(6)
    for name, label in (("fsdp2", "FSDP2, 20k"), ("megatron", "Megatron, 8k")):
        slow, fast = table["synchronous"][name], table["one_step"][name]
        rest_s = slow["step"] - slow["gen"] - slow["old"] - slow["update"]
        cases = [_one_step_case(name, *facts) for facts in trials(6, "spread", "engine_tensor", "training")]
        made = [each.generation_s(4) for each in cases]
        steps = [
            max(generation, each.old_s(12) + each.update_s(12, each.training)) + rest_s
            for generation, each in zip(made, cases, strict=True)
        ]
        figures += [
            spanned("generation on 4", label, "s", fast["decode"], made),
            spanned("step 4 + 12", label, "s", fast["step"], steps),
            spanned("gain", label, "", slow["step"] / fast["step"], [slow["step"] / step for step in steps]),
        ]
        stated.append(f"{label}: {cases[0]}")
        bounds.append(f"{label}: {'generation' if steps[0] <= made[0] + rest_s else 'training'}")
    figures.sort(key=lambda each: each.group)
    holds = within([figure for figure in figures if figure.group == "gain"], 0.15)
    finding = f"what the step waits for: {'; '.join(bounds)}"
    return row(6, figures, holds=holds, finding=finding, fitted="; ".join(stated) + " (synchronous parts)")


def _case(table: dict[str, Any], longest: int, spread: float, engine: int, group: int) -> Case:
    return Case(
        rows=table["rows"], prompt=table["prompt"], longest=longest, updates=table["updates"], spread=spread, engine=engine,
        group=group,
    )  # fmt: skip


def _one_step_case(name: str, spread: float, engine: float, share: float) -> Case:
    table = published(6)
    parts = table["synchronous"][name]
    case = _case(table, table["longest"][name], spread, int(engine), 4)
    return case.fitted(16, (parts["decode"], parts["old"], parts["update"]), 16, parts["update"], share)


@cache
def fully_async_case(spread: float, group: float, share: float) -> Case:
    """Fitted to the pair of 64 devices: the parts of its synchronous step, and the update of 32 devices that only train."""
    table, half = published(7), _FITTED_ON // 2
    at = table["devices"].index(_FITTED_ON)
    step, gen, old, update, alone = (table[name][at] for name in ("step", "gen", "old", "update", "async_update"))
    case = _case(table, table["longest"], spread, 2, int(group)).fitted(_FITTED_ON, (gen, old, update), half, alone, share)
    return replace(case, dedicated=case.trained_share(half, alone), other_s=step - gen - old - update)


def _over_range(predict: Callable[[Case], float]) -> list[float]:
    """The prediction, then its edges over what is assumed."""
    return [predict(fully_async_case(*facts)) for facts in trials(7, "spread", "sequence_parallel", "training")]


def _asynchronous_s(case: Case, devices: int) -> float:
    return _window_s(case, devices, published(7)["threshold"])


def fully_async() -> Row:
    """V7."""
    table, figures = published(7), []
    for devices, slow, fast, gain in zip(*(table[name] for name in ("devices", "step", "async_step", "gain")), strict=True):
        steps, windows = (
            _over_range(partial(Case.step_s, devices=devices)),
            _over_range(partial(_asynchronous_s, devices=devices)),
        )
        label = f"{devices} devices"
        how: How = "fitted" if devices == _FITTED_ON else "held out"
        gains = [step / window for step, window in zip(steps, windows, strict=True)]
        figures += [
            spanned("synchronous step", label, "s", slow, steps, how),
            spanned("asynchronous step", label, "s", fast, windows, how),
            spanned("gain", label, "", gain, gains, how),
        ]
    figures.sort(key=lambda each: (each.group == "gain", each.group, each.how))
    by_name = {(figure.group, figure.label): figure.predicted for figure in figures}
    flat = by_name["synchronous step", "128 devices"] / by_name["synchronous step", "64 devices"]
    found = [by_name["gain", f"{devices} devices"] for devices in table["devices"]]
    first = fully_async_case(*trials(7, "spread", "sequence_parallel", "training")[0])
    return row(
        7,
        figures,
        holds=all(1.6 <= gain <= 2.8 for gain in found) and abs(flat - 1) <= 0.15,
        finding=f"gains {', '.join(f'{gain:.2f}' for gain in found)}; the synchronous step on 128 devices is {flat:.2f} "
        "of that on 64 (published 0.98)",
        fitted=f"on 64 devices: {first}",
    )


def modes() -> Row:
    """V8."""
    given: dict[str, float] = published(8)["step"]
    found = {
        "synchronous": _over_range(partial(Case.step_s, devices=128)),
        "stream": _over_range(partial(_window_s, devices=128, threshold=0.0)),
        "partial": _over_range(partial(_asynchronous_s, devices=128)),
    }
    figures = [spanned("step", name, "s", seconds, found[name]) for name, seconds in given.items()]
    (slow, *_), steps = found["synchronous"], {name: each[0] for name, each in found.items()}
    gains = [
        Figure("gain over synchronous", name, "", given["synchronous"] / given[name], slow / steps[name])
        for name in ("stream", "partial")
    ]
    order = slow > steps["stream"] > steps["partial"]
    finding = "the order is as published" if order else "the order is another than published"
    return row(8, [*figures, *gains], holds=order and within(gains, 0.2), finding=finding, fitted="as V7: on 64 devices")


def thresholds() -> Row:
    """V9."""
    table = published(9)
    figures = [
        spanned("step", f"threshold {each:g}", "s", seconds, _over_range(partial(_window_s, devices=128, threshold=each)))
        for each, seconds in zip(table["thresholds"], table["step"], strict=True)
    ]
    steps = [figure.predicted for figure in figures]
    falls = all(later <= earlier for earlier, later in pairwise(steps[:3]))
    saturated = abs(steps[3] / steps[2] - 1) <= 0.1
    share = (steps[0] - steps[1]) / (steps[0] - steps[2]) if steps[0] > steps[2] else 0.0
    finding = f"the threshold 0.1 gives {share:.0%} of what 0.3 gives (published 70 %)"
    return row(9, figures, holds=falls and saturated, finding=finding, fitted="as V7: on 64 devices")
