"""What do episodes of several turns cost an actor, and how much of their tools' time does it hide?

- instant tools: an actor's loop with episodes of four turns, beside the same loop where each rollout is one turn of as many
  sampled tokens, with a tiny model, whose passes cost little more than starting them, and with one of 21 million parameters.
  What is read between the turns counts for neither.
- slow tools: the same episodes with tools that sleep (log-normal, mean 0.5 s, cut at 6 s), beside a loop that plays batch after
  batch, and beside TRL's `GRPOTrainer` with `tools`; updates are left out of all. And of the seconds that tools took, those in
  which the actor's engine decoded.

Rollouts differ in length, and both sides sample the same numbers of tokens (`episode_loops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from async_rlhf.experiments.throughput.engine import ThreadsOption
from async_rlhf.experiments.throughput.episode_loops import (
    GROUP_SIZE,
    GROUPS_PER_BATCH,
    TURNS,
    BatchLoop,
    Episode,
    Window,
    actor,
)
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, alternate
from async_rlhf.experiments.throughput.sides import ROOT
from async_rlhf.experiments.throughput.trl_environment import trl_python
from async_rlhf.experiments.throughput.trl_loop import TrlLoop

COST_GOAL, HIDDEN_GOAL, RATE_GOAL = 0.9, 0.9, 5.0
# Of a batch of TRL's: its tools run one after the other, so that a whole batch takes minutes, at the same samples a second.
TRL_GROUPS = 4

UseTrl = Annotated[bool, typer.Option(help="Measure TRL's loop too (installed into .venv-trl on first use).")]


def episodes(
    bench: Bench,
    slots: Annotated[int, typer.Option(min=GROUP_SIZE, help="Sequences decoded together.")] = 64,
    threads: ThreadsOption = 1,
    trl: UseTrl = True,
) -> Iterator[Row]:
    """Measure tokens/s with turns and without, samples/s beside synchronous loops, and the hidden share of tools' time."""
    python, missing = None, None
    try:
        python = trl_python(ROOT) if trl else None
    except MissingError as error:
        missing = error
    torch.set_num_threads(threads)
    slots = bench.size(slots, GROUP_SIZE)
    yield instant_tools(bench, slots, "tiny")
    yield instant_tools(bench, slots, "wide")
    yield from slow_tools(bench, slots, threads, python)
    if missing is not None:
        raise missing


def instant_tools(bench: Bench, slots: int, model: str) -> Row:
    first, measured = bench.size((4, 16), (1, 1))
    wide = model == "wide"
    with actor(Episode(TURNS, "instant"), slots, wide) as several, actor(Episode(1), slots, wide) as single:
        sides = {"turns": partial(several.play, first, measured), "one turn": partial(single.play, first, measured)}
        found = alternate(sides, bench.num_turns(3 if wide else 7), bench.size(1, 0))
    rates = {name: [each.tokens / each.seconds for each in windows] for name, windows in found.items()}
    # Other programs stretch seconds, and those of the side with more processes most; the loop's own time they stretch less.
    cpu = [one.cpu_s / one.tokens / (each.cpu_s / each.tokens) for each, one in zip(*found.values(), strict=True)]
    figures = {"by_cpu_time": median(cpu), "by_cpu_time_lowest": min(cpu), "by_cpu_time_highest": max(cpu)}
    return Row.of(f"{TURNS} turns, instant tools, {model} model", rates, "tok/s", at_least=COST_GOAL, figures=figures)


def slow_tools(bench: Bench, slots: int, threads: int, python: Path | None) -> Iterator[Row]:
    """python: that of TRL, None to leave it out."""
    groups = bench.size(2, 1) * GROUPS_PER_BATCH
    with ExitStack() as stack:
        ours, batches = stack.enter_context(actor(Episode(TURNS, "slow"), slots)), BatchLoop(Episode(TURNS), slots)
        sides: dict[str, Callable[[], Window]] = {
            "ours": partial(ours.play, groups // 2, groups),
            "batch after batch": partial(batches.play, 1),
        }
        if python is not None:
            # First, so that it has started before the others are measured; of its step it counts the seconds itself.
            sides = {"TRL": stack.enter_context(TrlLoop(python, bench.size(TRL_GROUPS, 1), threads)).play, **sides}
        found = alternate(sides, bench.num_turns(3), 0)
    rates = {name: [each.rollouts / each.seconds for each in windows] for name, windows in found.items()}
    batch_after_batch = rates["batch after batch"]
    beside = {"ours": rates["ours"], "batch after batch": batch_after_batch}
    yield Row.of(f"{TURNS} turns, slow tools", beside, "samples/s", at_least=RATE_GOAL)
    hidden = {"hidden": [each.hidden_s for each in found["ours"]], "tools": [each.tool_s for each in found["ours"]]}
    yield Row.of(f"{TURNS} turns, time of slow tools", hidden, "s", at_least=HIDDEN_GOAL)
    if python is not None:
        beside = {"ours": rates["ours"], "TRL": rates["TRL"]}
        figures = {"batch_after_batch_ratio": median(map(truediv, batch_after_batch, rates["TRL"]))}
        yield Row.of(f"{TURNS} turns, slow tools, beside TRL", beside, "samples/s", at_least=RATE_GOAL, figures=figures)
