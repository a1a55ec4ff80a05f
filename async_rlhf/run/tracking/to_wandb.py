"""Weights & Biases, with its own variables (`WANDB_PROJECT`, `WANDB_MODE=offline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from async_rlhf.run.tracking import Row, Tracked


def open_tracker(run: Tracked) -> WandB:
    return WandB(
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "async-rlhf"),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
            settings=wandb.Settings(console="off", silent=True),
        )
    )


class WandB:
    """A run of the project. Its own steps only rise, and an evaluation comes after later steps: each line has its own."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": at, **values})

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        made = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"step": step, "time": at, name: made})

    def flush(self) -> None:
        """Its own process writes what it was given."""

    def close(self) -> None:
        self._run.finish()
