"""How fast is a learner step next to a bare training loop and to TRL's? All on the same ready samples, in turns, on one CPU.

Lengths are long-tailed (log-normal, sigma 1, median 48, cut at 256 tokens; prompts of 60) and always the same.

- alone:  every completion has a prompt of its own. Nothing to share: what our machinery costs beside the bare loop.
- shared: 8 completions of each prompt, which the learner computes once for all of them.

Two models: the shipped tiny one, and one of 39 million random parameters with a vocabulary of 32,768. `learner_sides` says
what the sides do. A rate is completion tokens per second: prompts and padding are work, not result. A ratio is the median over
turns of the seconds of another side over ours, by the clock and of the processor; where other work uses the machine, the
second is the one to read. Run as `python -m async_rlhf.experiments.throughput.learner [--json]`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from async_rlhf.experiments.throughput.learner_sides import (
    WIDE,
    Seconds,
    Side,
    Trl,
    bare,
    long_tailed,
    make_groups,
    make_wide,
    off,
    ours,
    share_of_diagnostics,
)
from async_rlhf.experiments.throughput.sides import MODEL, ROOT
from async_rlhf.experiments.throughput.trl_environment import SkippedError, trl_python

GOALS = {"bare": 0.9, "trl": 1.3}
MOST_OVERHEAD = 0.03
_COMPLETIONS = 8


class Model(StrEnum):
    """What is trained."""

    TINY = "tiny"
    WIDE = "wide"


# Prompts of `shared`; a step of the wide model takes 50 times as long.
_PROMPTS = {Model.TINY: 8, Model.WIDE: 2}
_TURNS = {Model.TINY: 9, Model.WIDE: 3}


@dataclass(frozen=True)
class Result:
    """tokens_per_s: of each side, median of the turns. ratio, cpu_ratio: the other side's seconds over ours, by its name.

    overhead: share of our step's processor time that corrections, loss, entropy and diagnostics take, timed where they are
    called; the side `off` is the same by difference. machine_load: at the end.
    """

    model: str
    load: str
    completion_tokens: int
    turns: int
    tokens_per_s: Mapping[str, float]
    ratio: Mapping[str, float]
    cpu_ratio: Mapping[str, float]
    overhead: float
    machine_load: float


def judged(model: str, load: str, tokens: int, seconds: Mapping[str, Sequence[Seconds]], overhead: float) -> Result:
    """What the turns of all sides say; `seconds["ours"][i]` and the others' belong to the same turn."""
    others = [name for name in seconds if name != "ours"]

    def ratios(kind: str) -> dict[str, float]:
        return {
            name: statistics.median(
                getattr(theirs, kind) / getattr(mine, kind) for theirs, mine in zip(seconds[name], seconds["ours"], strict=True)
            )
            for name in others
        }

    return Result(
        model=model,
        load=load,
        completion_tokens=tokens,
        turns=len(seconds["ours"]),
        tokens_per_s={name: round(tokens / statistics.median(s.wall for s in each), 1) for name, each in seconds.items()},
        ratio={name: round(ratio, 3) for name, ratio in ratios("wall").items()},
        cpu_ratio={name: round(ratio, 3) for name, ratio in ratios("cpu").items()},
        overhead=round(overhead, 4),
        machine_load=round(os.getloadavg()[0], 1),
    )


def measure(model: Model, load: str, python: Path | None, turns: int, threads: int, directory: Path) -> Result:
    """All sides in turns, so that a slow moment of the machine falls on all; the first turn warms up."""
    lengths = long_tailed(_PROMPTS[model], _COMPLETIONS)
    lengths = lengths.reshape(-1, 1) if load == "alone" else lengths
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
        for side in sides.values():
            side()
        seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, side in sides.items():
                seconds[name].append(side())
    return judged(model, load, int(np.sum(lengths)), seconds, share_of_diagnostics(path, groups, threads))


def show(result: Result) -> str:
    """A line for each side, with the goal where there is one."""
    lines = [
        f"{result.model}, {result.load}: {result.completion_tokens} completion tokens, {result.turns} turns, "
        f"machine load {result.machine_load}",
        f"  {'ours':<6}{result.tokens_per_s['ours']:>10.0f} tok/s",
    ]
    for name, ratio in result.ratio.items():
        goal = f"   goal {GOALS[name]}" if name in GOALS else ""
        lines.append(
            f"  {name:<6}{result.tokens_per_s[name]:>10.0f} tok/s   ours is {ratio:.2f} x, in processor time "
            f"{result.cpu_ratio[name]:.2f} x{goal}"
        )
    lines.append(f"  corrections and diagnostics: {result.overhead:.1%} of our step   goal {MOST_OVERHEAD:.0%} at most")
    return "\n".join(lines)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model and load instead of lines.")] = False,
    only: Annotated[list[Model] | None, typer.Option("--model", help="Only this model; may be repeated.")] = None,
    load: Annotated[list[str] | None, typer.Option(help="Only this load: alone or shared; may be repeated.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Timed turns after one to warm up; else 9 and 3.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, the same for all.")] = 1,
    trl: Annotated[bool, typer.Option(help="Measure TRL's training part too (installed into .venv-trl on first use).")] = True,
    require_trl: Annotated[bool, typer.Option(help="Fail when TRL cannot be installed, rather than go on without.")] = False,
) -> None:
    """Compare a learner step with a bare training loop and with TRL's (about seven minutes)."""
    loads = load or ["alone", "shared"]
    if unknown := set(loads) - {"alone", "shared"}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are alone, shared")
    python = None
    try:
        python = trl_python(ROOT) if trl else None
    except SkippedError as reason:
        typer.echo(f"without TRL: {reason}", err=True)
        if require_trl:
            raise typer.Exit(1) from reason
    torch.set_num_threads(threads)
    for model in only or list(Model):
        for each in loads:
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                result = measure(model, each, python, turns or _TURNS[model], threads, Path(directory))
            typer.echo(json.dumps(asdict(result)) if as_json else show(result))


if __name__ == "__main__":
    typer.run(main)
