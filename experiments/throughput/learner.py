"""How fast is a learner step next to a bare training loop and to TRL's? All on the same ready samples, in turns, on one CPU.

Lengths are long-tailed (log-normal, sigma 1, median 48, cut at 256 tokens; prompts of 60) and always the same.

- alone:  every completion has a prompt of its own. Nothing to share: what our machinery costs beside the bare loop.
- shared: 8 completions of each prompt, which the learner computes once for all of them.

Two models: the shipped tiny one, and one of 39 million random parameters with a vocabulary of 32,768. `learner_sides` describes
what the sides do. A rate is completion tokens a second by the clock: prompts and padding are work, not result. `cpu_ratio` is
the same ratio in processor time: read it where other programs use the machine.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from async_rlhf.experiments.throughput.engine import ThreadsOption
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, alternate
from async_rlhf.experiments.throughput.learner_sides import (
    WIDE,
    Seconds,
    Side,
    Trl,
    bare,
    diagnostics_seconds,
    long_tailed,
    make_groups,
    make_wide,
    off,
    ours,
)
from async_rlhf.experiments.throughput.sides import MODEL, ROOT
from async_rlhf.experiments.throughput.trl_environment import trl_python

GOALS = {"bare": 0.9, "trl": 1.3}
MOST_OVERHEAD = 0.03
_COMPLETIONS = 8


class Model(StrEnum):
    """What is trained."""

    TINY = "tiny"
    WIDE = "wide"


class Sharing(StrEnum):
    """Whether completions share prompts."""

    ALONE = "alone"
    SHARED = "shared"


# Prompts of `shared`; a step of the wide model takes 50 times as long.
_PROMPTS = {Model.TINY: 8, Model.WIDE: 2}
_TURNS = {Model.TINY: 6, Model.WIDE: 3}


Loads = Annotated[list[Sharing] | None, typer.Option("--load", help="Only this load; may be repeated.")]
Models = Annotated[list[Model] | None, typer.Option("--model", help="Only this model; may be repeated.")]
UseTrl = Annotated[bool, typer.Option(help="Measure TRL's training part too (installed into .venv-trl on first use).")]


def learner(
    bench: Bench, model: Models = None, load: Loads = None, threads: ThreadsOption = 1, trl: UseTrl = True
) -> Iterator[Row]:
    """Compare a learner step with a bare training loop and with TRL's, in completion tokens a second."""
    python, missing = None, None
    try:
        python = trl_python(ROOT) if trl else None
    except MissingError as error:
        missing = error
    torch.set_num_threads(threads)
    for each in model or bench.size(list(Model), [Model.TINY]):
        for name in load or list(Sharing):
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                yield from measure(each, name, python, bench.num_turns(_TURNS[each]), threads, Path(directory))
    if missing is not None:
        raise missing


def measure(model: Model, load: Sharing, python: Path | None, turns: int, threads: int, directory: Path) -> Iterator[Row]:
    """All sides in turns; one row for each side beside ours, and one for the share of diagnostics."""
    lengths = long_tailed(_PROMPTS[model], _COMPLETIONS)
    lengths = lengths.reshape(-1, 1) if load is Sharing.ALONE else lengths
    path = MODEL if model is Model.TINY else make_wide(directory / "model")
    groups = make_groups(lengths, 99 if model is Model.TINY else WIDE["vocab_size"])
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            "ours": ours(path, groups, threads),
            "off": off(path, groups, threads),
            "bare": bare(path, groups),
        }
        if python is not None:
            sides["trl"] = stack.enter_context(Trl(python, path, groups, threads, directory))
        seconds = alternate(sides, turns)
    yield from beside(f"{model}, {load}", int(np.sum(lengths)), seconds)
    whole, diagnostics = diagnostics_seconds(path, groups, threads)
    parts = {"diagnostics": [diagnostics], "step": [whole]}
    yield Row.of(f"{model}, {load}: corrections and diagnostics", parts, "CPU s", at_most=MOST_OVERHEAD)


def beside(load: str, tokens: int, seconds: Mapping[str, Sequence[Seconds]]) -> Iterator[Row]:
    """A row for each other side; `seconds["ours"][i]` and the others' belong to the same turn."""
    for name in [each for each in seconds if each != "ours"]:
        pair = {"ours": seconds["ours"], name: seconds[name]}
        rate = {side: [tokens / each.wall for each in turns] for side, turns in pair.items()}
        cpu = statistics.median(b.cpu / a.cpu for a, b in zip(*pair.values(), strict=True))
        further = {"cpu_ratio": cpu, "tokens": tokens}
        yield Row.of(f"{load}, beside {name}", rate, "tok/s", at_least=GOALS.get(name), figures=further)
