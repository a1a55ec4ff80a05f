"""All throughput benchmarks, one after the other: `python -m experiments.throughput` (`make bench`).

Each runs in a process of its own, so that threads and memory of one are nothing to the next; each can be run alone by
its module's name and then has more options.
"""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]


class Part(StrEnum):
    """A benchmark: the name of its module here."""

    ENGINE = "engine"
    UPDATES = "updates"
    VLLM = "vllm_side"
    QUEUE = "queue"
    LEARNER = "learner"
    PIPELINE = "pipeline"
    FUSION = "fusion"
    WEIGHTS = "weights"


def main(
    only: Annotated[list[Part] | None, typer.Option(help="Only this benchmark; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
    require_trl: Annotated[bool, typer.Option(help="Fail when TRL cannot be installed, rather than skip.")] = False,
) -> None:
    """Measure ratios: engine, queue, learner and weights against the plain thing each replaces, all against TRL."""
    failed = [part for part in only or list(Part) if run(part, as_json, require_trl)]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def run(part: Part, as_json: bool, require_trl: bool) -> int:
    """Exit code of one benchmark; what it writes goes where ours goes."""
    if not as_json:
        typer.echo(f"-- {part}")
    options = ["--json"] * as_json + ["--require-trl"] * (require_trl and part is Part.PIPELINE)
    command = [sys.executable, "-m", f"experiments.throughput.{part}", *options]
    return subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    typer.run(main)
