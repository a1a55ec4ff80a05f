"""Trackio, with its own variables (`TRACKIO_DIR`, `TRACKIO_SERVER_URL`, `TRACKIO_SPACE_ID`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from async_rlhf.run.tracking import Row, Tracked


def open_tracker(run: Tracked) -> Trackio:
    return Trackio(run)


class Trackio:
    """A run of the project `async-rlhf` (`TRACKIO_PROJECT`). It is found again by its name, so that ends in the run's `id`."""

    def __init__(self, run: Tracked) -> None:
        self._tracked, self._run = run, self._begin(run)

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._begin(self._tracked)
        self._run.log(dict(values), step=step)

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        made: Any = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.log(step, at, {name: made})

    def flush(self) -> None:
        """To finish is the only way to wait for what was logged; the run is resumed, which takes a thirtieth of a second."""
        if self._run is not None:
            trackio.finish()
            self._run = None

    def close(self) -> None:
        self.flush()

    @staticmethod
    def _begin(run: Tracked) -> Any:
        return trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "async-rlhf"),
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=run.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
