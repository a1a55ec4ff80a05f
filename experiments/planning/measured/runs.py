"""Runs one cell once, as `train` does, and gives what it has measured of it and of what else the machine did meanwhile."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from async_rlhf.api import train
from async_rlhf.experiments.planning.measured import facts
from async_rlhf.experiments.planning.measured.cells import Cell
from async_rlhf.experiments.throughput.harness import Watch
from async_rlhf.run.run_dir import RunDir

_STALL_S = 120.0


def measure(cell: Cell, seconds: float) -> dict[str, float | None]:
    """Facts by name. seconds: of training, with the start of the actors; the whole run takes some ten more.

    Raises what a run raises, and `facts.TooShortError`.
    """
    watch, began = Watch(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlhf-measured-") as directory:
        own = {"name": cell.name, "output_dir": directory, "max_seconds": seconds, "stall_timeout_s": _STALL_S}
        train("quick", overrides={**cell.settings, **own}, quiet=True)
        found = facts.read(RunDir.existing(Path(directory) / cell.name), cell.max_staleness)
    return {**found, **watch.lap(), "wall_s": time.monotonic() - began}
