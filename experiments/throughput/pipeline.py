"""How fast is the whole system next to TRL's GRPOTrainer? Same model, prompts, sizes and CPU threads, in turns.

Three loads, each 16 prompts x 8 completions a step of the tiny speller, at most 32 new tokens, float32, 2 threads in
all (TRL: 2 in its one process; ours: 1 in the actor, 1 in the learner):

- natural: completions end where the model ends them, after about 6 tokens.
- full:    the same weights with an end token that is never sampled, so that every completion has 32 tokens.
- slow:    natural, with an asynchronous reward that sleeps log-normally (mean 0.25 s, cut at 3 s).

A rate is completions trained on per second of wall time between the ends of two steps in the middle of a run, where
nothing starts and nothing runs out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.experiments.throughput.harness import Bench, Row, alternate, await_quiet
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.sides import (
    LOADS,
    MODEL,
    OF_TRL,
    ROOT,
    Load,
    Recorded,
    Steps,
    make_endless,
    our_config,
    run_ours,
    run_trl,
    write_prompts,
)
from async_rlhf.experiments.throughput.trl_environment import trl_python

_QUIET_LIMIT_S = 60.0


class Name(StrEnum):
    """The loads of `sides.LOADS`."""

    NATURAL = "natural"
    FULL = "full"
    SLOW = "slow"


Loads = Annotated[list[Name] | None, typer.Option("--load", help="Only this load; may be repeated.")]


def pipeline(bench: Bench, load: Loads = None) -> Iterator[Row]:
    """Compare the whole system with TRL's GRPOTrainer, in completions a second."""
    python = trl_python(ROOT)
    for each in LOADS:
        if each.name in (load or bench.size(list(Name), [Name.NATURAL])):
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                yield compare(each, bench, python, Path(directory))


def compare(load: Load, bench: Bench, python: Path, directory: Path) -> Row:
    """Both in turns without one to warm up: a run starts anew, and its first steps are not in the window."""
    prompts = write_prompts(directory / "prompts.jsonl")
    model = make_endless(MODEL, directory / "endless") if load.never_ends else MODEL
    lengths: dict[str, list[float]] = {"ours": [], "trl": []}

    def side(name: str, steps: Steps, run: Callable[[Path], Recorded]) -> Callable[[], float]:
        def one() -> float:
            place = directory / f"{name}-{len(lengths[name])}"
            place.mkdir()
            await_quiet(0.0 if bench.small else _QUIET_LIMIT_S)
            recorded = run(place)
            lengths[name].append(mean_length(recorded.tokens, steps, BATCH_SIZE))
            return window_rate(recorded.ends, steps, BATCH_SIZE)

        return one

    sides = {
        "ours": side("ours", Steps.of_ours(load.max_staleness), lambda place: run_ours(load, model, prompts, place)),
        "trl": side("trl", OF_TRL, lambda place: run_trl(python, load, model, prompts, place)),
    }
    rates = alternate(sides, bench.num_turns(2), warm_up=0)
    mean = {f"{name}_mean_length": statistics.median(each) for name, each in lengths.items()}
    settings = our_config(load, model, prompts, directory)
    mean |= {"max_staleness": settings.queue.max_staleness, "max_concurrency": settings.scoring.max_concurrency}
    return Row.of(load.name, rates, "samples/s", at_least=load.goal, figures=mean)


def window_rate(ends: Sequence[float], steps: Steps, batch_size: int) -> float:
    """Completions per second from the end of step `first` to the end of step `first + measured`.

    ends: monotonic seconds at which each step ended. Raises ValueError when the run ended inside the window.
    """
    until = steps.first + steps.measured
    if len(ends) < until:
        raise ValueError(f"the measured window ends with step {until}, the run had {len(ends)} steps")
    return steps.measured * batch_size / (ends[until - 1] - ends[steps.first - 1])


def mean_length(tokens: Sequence[int], steps: Steps, batch_size: int) -> float:
    """Mean tokens of a completion in the measured window."""
    measured = tokens[steps.first : steps.first + steps.measured]
    return sum(measured) / (len(measured) * batch_size)
