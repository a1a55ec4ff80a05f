"""Weights & Biases, with its own variables (`WANDB_PROJECT`, `WANDB_MODE=offline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from async_rlhf.run.tracking import PROJECT, Row, Tracked


class Service:
    """A run of the project. Its own steps only rise, and an evaluation comes after later steps: each line has its own."""

    def __init__(self, run: Tracked) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, at: float, values: Mapping[str, object]) -> None:
        self._run.log({"step": step, "time": at, **values})

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        self.log(step, at, {name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])})

    def images(self, name: str, step: int, at: float, shown: Mapping[str, Any]) -> None:
        self.log(step, at, {name: [wandb.Image(image, caption=digest) for digest, image in shown.items()]})

    def flush(self) -> None:
        """The library's own process writes the data."""

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # waits for its own process, which a tracker's end would take with it: no `atexit` runs there
