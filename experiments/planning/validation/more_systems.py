"""V12, V13 and V16: LlamaRL, the asynchronous RLHF of Noukhovitch et al. (Mila), and NeMo-Aligner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.schedules import Stage, StageTime, schedule, step_time
from async_rlhf.experiments.planning.model.stages import Place
from async_rlhf.experiments.planning.validation import calls
from async_rlhf.experiments.planning.validation.rows import Row, model, published, row, spanned, trials

_SPREAD = 0.7  # of log lengths: the planner's own
_SHARES = 4  # the devices of LlamaRL are divided in so many parts
Facts = tuple[float, ...]


def llamarl() -> Row:
    """V12: generators and trainers in layouts of their own, beside one that generates in the layout of training."""
    table, figures = published(12), []
    for name, gain, nodes in zip(table["models"], table["gain"], table["nodes"], strict=True):
        devices = nodes * calls.NODE
        steps = [
            _llamarl_s(name, int(factor * devices), mean, int(rows))
            for factor, mean, rows in trials(12, "devices", "mean", "rows")
        ]
        gains = [slow / fast for slow, fast in steps if math.isfinite(slow) and math.isfinite(fast)]
        figures.append(spanned("gain", f"{name} on {devices}", "", gain, gains))
    rises = all(earlier.predicted < later.predicted for earlier, later in pairwise(figures))
    found = ", ".join(f"{figure.predicted:.2f}" for figure in figures)
    return row(12, figures, holds=rises, finding=f"gains {found}, with the planner's own efficiencies")


@cache
def _llamarl_s(name: str, devices: int, mean: float, rows: int) -> tuple[float, float]:
    """In turns in one layout, and apart, by the best division of the devices."""
    table = published(12)
    place = Place(model=model(name), device=device("H100"), efficiency=calls.efficiency())
    completions = calls.lengths(rows, mean, _SPREAD, table["longest"])
    tokens, prompt, updates = round(table["prompt"] + mean), table["prompt"], table["updates"]
    layout = calls.best_training(place, devices, rows, tokens, updates=updates)
    if layout is None:
        return math.inf, math.inf
    parts = layout.tensor * layout.pipeline
    kept = layout.model.training_bytes(1, layout.data) / parts - layout.model.weight_bytes / parts
    in_turns = calls.trained_s(layout, rows, tokens, updates=updates)
    in_turns += calls.generation_s(layout, completions, prompt, kept_bytes=kept)
    apart = min(
        max(
            calls.best_generation_s(place, part * devices // _SHARES, completions, prompt),
            calls.best_training_s(place, devices - part * devices // _SHARES, rows, tokens, updates=updates),
        )
        for part in range(1, _SHARES)
    )
    return in_turns, apart


def mila() -> Row:
    """V13: one device that generates and the others that train, a step apart."""
    figures = [
        spanned(
            "gain",
            f"{case['model']}, {case['devices'] - 1} + 1",
            "",
            case["gain"],
            [_mila_gain(case, *facts) for facts in trials(13, "samples", "prompt")],
        )
        for case in published(13)["case"]
    ]
    holds = all(1.2 <= figure.predicted <= 1.7 for figure in figures)
    return row(13, figures, holds=holds, finding="with the planner's own efficiencies, on the devices of the paper")


def _mila_gain(case: Mapping[str, Any], samples: float, prompt: float) -> float:
    """Generation, scoring and training one after the other, against generation beside the rest, on the same devices."""
    place = Place(model=model(case["model"]), device=device(case["device"]), efficiency=calls.efficiency())
    rows, tokens, trainers = case["rows"], round(prompt) + case["answer"], case["devices"] - 1
    made = int(samples * rows)
    generation = calls.generation_s(place, (case["answer"],) * made, round(prompt))
    others = calls.placed(place, 1, 1, trainers)
    scoring = calls.scored_s(others, made, tokens) + calls.scored_s(others, made, tokens, head=False)
    training = calls.trained_s(others, rows, tokens, updates=1, zero_stage=2)
    seconds: dict[Stage, float] = {"generate": generation, "score": scoring, "train": training}
    times = {stage: StageTime(each, each) for stage, each in seconds.items()}
    return step_time(schedule("synchronous"), times).seconds / step_time(schedule("one_step"), times).seconds


def nemo() -> Row:
    """V16: strong scaling; one job has actor and reference, another critic and reward model."""
    table, facts = published(16), trials(16, "spread", "micro_batch", "longest")
    steps = {each: [_nemo_s(nodes, each, _launch_s(each)) for nodes in table["nodes"]] for each in facts}
    figures, gains = [], []
    for number, (nodes, seconds) in enumerate(zip(table["nodes"], table["step"], strict=True)):
        label = f"{nodes[0]} + {nodes[1]} nodes"
        found = [steps[each][number] for each in facts]
        figures.append(spanned("step", label, "s", seconds, found, "held out" if number else "fitted"))
        if number:
            speed_ups = [steps[each][0] / steps[each][number] for each in facts]
            gains.append(spanned("speed-up", label, "", table["step"][0] / seconds, speed_ups))
    figures.sort(key=lambda each: each.how)
    return row(
        16,
        [*figures, *gains],
        holds=all(abs(figure.ratio - 1) <= 0.15 for figure in gains),
        finding="speed-ups " + ", ".join(f"{figure.predicted:.2f}" for figure in gains),
        fitted=f"on 8 + 4 nodes: a decode step + {_launch_s(facts[0]) * 1e3:.0f} ms",
    )


def _nemo_s(nodes: tuple[int, int], facts: Facts, launch_s: float) -> float:
    """Generation in tensor groups of a node, then log-probabilities of policy and reference, then training.

    The critic's job answers with values and rewards while generation goes on, and trains beside the actor; a step waits for the
    slower of both. The engine generates a micro-batch of rows whole, then the next: data-parallel ranks take them from a shared
    iterator. facts: spread of the lengths; rows of one call of the engine; where generation is cut, in tokens.
    """
    table, (actor_nodes, critic_nodes) = published(16), nodes
    rows, tokens, updates = table["rows"], round(table["prompt"] + table["mean"]), table["updates"]
    place = Place(model=model("llama-70b"), device=device("H100"), efficiency=calls.efficiency(launch_s=launch_s))
    one = calls.placed(place, calls.NODE, 1, 1)
    completions, size = calls.lengths(rows, table["mean"], facts[0], int(facts[2])), int(facts[1])
    taken = (calls.generation_s(one, completions[at : at + size], table["prompt"]) for at in range(0, rows, size))
    generation = calls.most_loaded(taken, actor_nodes)
    devices, others = actor_nodes * calls.NODE, critic_nodes * calls.NODE
    scoring = 2 * calls.best_scoring_s(place, devices, rows, tokens)
    answering = 2 * calls.best_scoring_s(place, others, rows, tokens, head=False)
    training = calls.best_training_s(place, devices, rows, tokens, updates=updates)
    beside = calls.best_training_s(place, others, rows, tokens, updates=updates)
    return max(generation + scoring, answering) + max(training, beside)


@cache
def _launch_s(facts: Facts) -> float:
    """Of a decode step besides weights and caches, from the smallest run."""
    table = published(16)
    nodes, target = table["nodes"][0], table["step"][0]
    # The step is linear in it, as long as the actor's job is the slower one.
    without, second = (_nemo_s(nodes, facts, each) for each in (0.0, 1.0))
    return float((target - without) / (second - without))
