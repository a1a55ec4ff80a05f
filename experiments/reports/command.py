"""`async-rlhf report DIR`: the pages of a sweep or of one run, made again from what is on disk alone.

Called by the command line, through the entry point in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.reports import run
from async_rlhf.experiments.staleness import report as of_sweep
from async_rlhf.experiments.staleness.archive import holds_cells, read_sweep
from async_rlhf.run.run_dir import RunDir


def report(directory: Path, say: Callable[[str], None]) -> list[Path]:
    """What was written: tables and pictures, then report.md and report.html.

    directory: of a sweep's results (with cells/*.json), or of one run, which may live. Raises ConfigError for any other, for a
    run without a step, and where nothing can be written; DamagedError.
    """
    try:
        if holds_cells(directory):
            return of_sweep.write(read_sweep(directory), directory, say)
        if (directory / "config.toml").exists():
            return run.write(RunDir.existing(directory), say)
    except OSError as error:
        raise ConfigError(f"the report of {str(directory)!r} cannot be written: {error}") from error
    raise ConfigError(
        f"{str(directory)!r} is no directory of a sweep (it has no cells/*.json) and of no run (it has no config.toml)"
    )
