"""`python -m async_rlhf.experiments.soak [--minutes M] [--steps N] [--kills K] [--out DIR]`: a run that is not to grow."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.experiments.soak.report import write
from async_rlhf.experiments.soak.soak import SoakPlan, books, soak
from async_rlhf.run.run_dir import RunDir

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Directory, made; must be new.")],
    minutes: Annotated[float, typer.Option(min=0.5, help="How long, at most.")] = 20.0,
    steps: Annotated[int | None, typer.Option(min=1, help="End when so many are trained.")] = None,
    kills: Annotated[int, typer.Option(min=0, help="Of actor, hub and learner, at even distances.")] = 9,
    viewers: Annotated[int, typer.Option(min=0, help="That poll the page.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the order of the kills.")] = 0,
) -> None:
    """Let a tiny endless run go on under kills, changes, rotation and viewers: report.md in OUT.

    Exit code 1 when something grows, the books are not right, or the run did not end well.
    """
    if out.exists():
        raise typer.BadParameter(f"--out {str(out)!r} exists; choose a new directory")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends too
    out = out.absolute()
    out.mkdir(parents=True)
    plan = SoakPlan(seconds=60 * minutes, steps=steps, kills=kills, viewers=viewers, seed=seed)
    seen = soak(plan, out)
    is_good = write(plan, seen, books(RunDir.existing(out / "run"), seen.rows), out)
    typer.echo((out / "report.md").read_text())
    raise typer.Exit(0 if is_good else 1)


if __name__ == "__main__":
    app()
