"""All throughput benchmarks, one after the other: `python -m async_rlhf.experiments.throughput` (`make bench`).

Each runs in a process of its own, so that threads and memory of one are nothing to the next; each can be run alone by
its module's name and then has more options. A part that needs what is not installed says so and the next one runs; one that
fails or takes longer than its limit is named at the end, and the exit status is then 1. All together take less than half an
hour of two cores that do nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]


class Part(StrEnum):
    """A benchmark: the name of its module here."""

    ENGINE = "engine"
    INVARIANCE = "invariance"
    UPDATES = "updates"
    DISPATCH = "dispatch"
    VLLM = "vllm_side"
    VLLM_UPDATES = "vllm_updates"
    QUEUE = "queue"
    LEARNER = "learner"
    LOSS_MEMORY = "loss_memory"
    CHECKPOINT = "checkpoint"
    ZERO_MEMORY = "zero_memory"
    PIPELINE = "pipeline"
    FUSION = "fusion"
    WEIGHTS = "weights"
    ADAPTERS = "adapters"


# Seconds after which a part is ended: several times what it takes on a machine that does nothing else.
LIMIT_S = 1800.0
_ASK_TRL = (Part.LEARNER, Part.PIPELINE)


def main(
    only: Annotated[list[Part] | None, typer.Option(help="Only this benchmark; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
    require_trl: Annotated[bool, typer.Option(help="Fail when TRL cannot be installed, rather than skip.")] = False,
) -> None:
    """Measure ratios: engine, queue, learner and weights against the plain thing each replaces, all against TRL.

    Parts: engine, invariance, updates, dispatch, vllm_side, vllm_updates, queue, learner, loss_memory, checkpoint, zero_memory,
    pipeline, fusion, weights, adapters.
    """
    failed = [part for part in only or list(Part) if run(part, as_json, require_trl)]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def run(part: Part, as_json: bool, require_trl: bool) -> int:
    """Exit code of one benchmark, 124 when it ran into `LIMIT_S`; what it writes goes where ours goes."""
    if not as_json:
        typer.echo(f"-- {part}")
    options = ["--json"] * as_json + ["--require-trl"] * (require_trl and part in _ASK_TRL)
    command = [sys.executable, "-m", f"async_rlhf.experiments.throughput.{part}", *options]
    try:
        return subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        typer.echo(f"{part} was ended after {LIMIT_S:.0f} s", err=True)
        return 124


if __name__ == "__main__":
    typer.run(main)
