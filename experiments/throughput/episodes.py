"""What do episodes of several turns cost an actor, and how much of their tools' time does it hide?

- instant tools: an actor's loop with episodes of four turns, beside the same loop where each rollout is one turn of as many
  sampled tokens. What is read between the turns counts for neither.
- slow tools: the same episodes with tools that sleep (log-normal, mean 0.5 s, cut at 6 s), beside a loop that plays batch after
  batch. And of the seconds that tools took, those in which the actor's engine decoded.

Rollouts differ in length, and both sides sample the same numbers of tokens (`episode_loops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer

from async_rlhf.experiments.throughput.engine import ThreadsOption
from async_rlhf.experiments.throughput.episode_loops import GROUP_SIZE, GROUPS_PER_BATCH, TURNS, BatchLoop, Episode, actor
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate

COST_GOAL, HIDDEN_GOAL, RATE_GOAL = 0.9, 0.9, 5.0


def episodes(
    bench: Bench,
    slots: Annotated[int, typer.Option(min=GROUP_SIZE, help="Sequences decoded together.")] = 64,
    threads: ThreadsOption = 1,
) -> Iterator[Row]:
    """Measure tokens/s with turns and without, samples/s beside a synchronous loop, and the hidden share of tools' time."""
    torch.set_num_threads(threads)
    slots = bench.size(slots, GROUP_SIZE)
    yield instant_tools(bench, slots)
    yield from slow_tools(bench, slots)


def instant_tools(bench: Bench, slots: int) -> Row:
    first, measured = bench.size((4, 16), (1, 1))
    with actor(Episode(TURNS, "instant"), slots) as several, actor(Episode(1), slots) as single:
        sides = {"turns": partial(several.play, first, measured), "one turn": partial(single.play, first, measured)}
        found = alternate(sides, bench.num_turns(7), bench.size(1, 0))
    rates = {name: [each.tokens / each.seconds for each in windows] for name, windows in found.items()}
    # Other programs stretch seconds, and those of the side with more processes most; the loop's own time they stretch less.
    cpu = [one.cpu_s / one.tokens / (each.cpu_s / each.tokens) for each, one in zip(*found.values(), strict=True)]
    figures = {"by_cpu_time": median(cpu), "by_cpu_time_lowest": min(cpu), "by_cpu_time_highest": max(cpu)}
    return Row.of(f"{TURNS} turns, instant tools", rates, "tok/s", at_least=COST_GOAL, figures=figures)


def slow_tools(bench: Bench, slots: int) -> Iterator[Row]:
    groups = bench.size(2, 1) * GROUPS_PER_BATCH
    with actor(Episode(TURNS, "slow"), slots) as ours:
        batches = BatchLoop(Episode(TURNS), slots)
        sides = {"ours": partial(ours.play, groups // 2, groups), "batch after batch": partial(batches.play, 1)}
        found = alternate(sides, bench.num_turns(3), 0)
    rates = {name: [each.rollouts / each.seconds for each in windows] for name, windows in found.items()}
    yield Row.of(f"{TURNS} turns, slow tools", rates, "samples/s", at_least=RATE_GOAL)
    hidden = {"hidden": [each.hidden_s for each in found["ours"]], "tools": [each.tool_s for each in found["ours"]]}
    yield Row.of(f"{TURNS} turns, time of slow tools", hidden, "s", at_least=HIDDEN_GOAL)
