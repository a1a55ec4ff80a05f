"""Trackio, with its own variables (`TRACKIO_DIR`, `TRACKIO_SERVER_URL`, `TRACKIO_SPACE_ID`)."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import trackio

from async_rlhf.run.tracking import PROJECT, Row, Tracked


class Service:
    """A run of the project `TRACKIO_PROJECT`. It is found again by its name, so that ends in the run's `id`."""

    def __init__(self, run: Tracked) -> None:
        self._tracked, self._is_open = run, False

    def log(self, step: int, at: float, values: Mapping[str, object]) -> None:
        if not self._is_open:
            with redirect_stdout(io.StringIO()):  # it prints at each call
                trackio.init(
                    project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                    name=f"{self._tracked.name}-{self._tracked.id[:8]}",
                    resume="allow",
                    config=self._tracked.config,
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            self._is_open = True
        trackio.log(dict(values), step=step)

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        self.log(step, at, {name: trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])})

    def images(self, name: str, step: int, at: float, shown: Mapping[str, Any]) -> None:
        named = {f"{name}/{number}": each for number, each in enumerate(shown.items(), 1)}
        self.log(step, at, {key: trackio.Image(image, caption=digest) for key, (digest, image) in named.items()})

    def flush(self) -> None:
        """Only `finish` waits for logged data. Later calls resume the run, in a thirtieth of a second."""
        if self._is_open:
            with redirect_stdout(io.StringIO()):
                trackio.finish()
        self._is_open = False

    close = flush
