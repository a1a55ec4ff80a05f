"""Commands that hand a run on: track, push."""

from __future__ import annotations

from typing import Annotated

import typer

from async_rlhf.cli.app import RunPath, app, command, say


@command(app)
def track(
    run_dir: RunPath,
    to: Annotated[str, typer.Option("--to", metavar="KIND", help="tensorboard, wandb, trackio or mlflow.")],
) -> None:
    """Send a run to a tracker, from its files. A finished one whole; of a live one what it has and what it adds, to its end.

    Ctrl-C ends it, and the same command goes on where it was. It needs the tracker's package; torch and transformers it does
    not need.
    """
    from async_rlhf.run.processes.tracking import track
    from async_rlhf.run.run_dir import RunDir

    track(RunDir.existing(run_dir), to, say)
