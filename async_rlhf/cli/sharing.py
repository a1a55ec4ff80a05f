"""Commands that hand a run on: track, push."""

from __future__ import annotations

from pathlib import Path
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


@command(app)
def push(
    path: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's newest checkpoint, or RUN/checkpoints/best.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository that only its owner reads.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, which names its base model.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Add a commit to a repository that has content.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the card and the files; send nothing.")] = False,
) -> None:
    """Put a model on the Hugging Face Hub. With tokenizer, a card of how it was trained and measured, and a picture.

    All of it is searched for tokens, paths of this machine and secrets of the environment first.
    """
    from async_rlhf.push.upload import How, push

    push(path, name, How(private, adapter, update, dry_run), say)
