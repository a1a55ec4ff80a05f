"""A sweep on disk: what it was (`sweep.json`), what its cells measured, and the same read again.

    sweep.json         the command, the grid, the seeds, the base and what was laid upon it
    cells/RUN.json     what a finished cell measured

All of it may be moved, and is enough to make every table and picture again. Called by `sweep`, the reports and notebooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.files import write_whole
from async_rlhf.experiments.staleness.cells import kept, read_run
from async_rlhf.experiments.staleness.config import SweepConfig, shown
from async_rlhf.experiments.staleness.table import Table
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import masked
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import read_small

# Where tables and runs lie is where the file lies.
_ELSEWHERE = {"output_dir", "results"}
_UNKNOWN_JOBS = 2


@dataclass(frozen=True)
class Archive:
    """A sweep and what its cells measured, in its order. command: what it was started with; missing: settings and seeds of
    cells that have no result, since they failed or were not run; alone: one cell ran at a time, so that their seconds can be
    compared."""

    sweep: SweepConfig
    command: str
    table: Table
    missing: Sequence[str] = ()
    alone: bool = False


class _Kept(BaseModel):
    """jobs: the most cells that ever ran at once; where that is not known, more than one may have."""

    command: str
    sweep: SweepConfig
    jobs: int = _UNKNOWN_JOBS


def keep_sweep(sweep: SweepConfig, command: str, jobs: int) -> None:
    """Write `sweep.json` where the sweep's results lie. jobs: cells that run at once now. Raises OSError."""
    overrides = {key: masked(key, value, Config) for key, value in sweep.overrides.items()}
    about = sweep.model_copy(update={"overrides": overrides, "base": Path(sweep.base).name})
    path = sweep.results_dir / "sweep.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        try:
            jobs = max(jobs, _read(path).jobs)
        except DamagedError:  # it is written again
            jobs = max(jobs, _UNKNOWN_JOBS)
    kept_now = _Kept(command=command, sweep=about, jobs=jobs)
    write_whole(path, kept_now.model_dump_json(indent=1, exclude={"sweep": _ELSEWHERE}).encode() + b"\n")


def holds_cells(directory: Path) -> bool:
    return any((directory / "cells").glob("*.json"))


def read_sweep(directory: Path) -> Archive:
    """The sweep in its results' directory, from what is kept there alone. Raises ConfigError where no cell or no `sweep.json`
    is, DamagedError."""
    kept_results = [result for path in sorted((directory / "cells").glob("*.json")) if (result := kept(path)) is not None]
    if not kept_results:
        raise ConfigError(f"{str(directory)!r} has no finished cell of a sweep (cells/*.json)")
    path = directory / "sweep.json"
    if not path.exists():
        raise ConfigError(
            f"{str(path)!r} is missing, which says what was swept: copy it with the cells, or run the sweep again"
        )
    about = _read(path)
    sweep = about.sweep
    cells = {shown((*result.setting, ("seed", result.seed))): result for result in kept_results}
    # seed first, then the grid, as `load_sweep` orders cells
    grid = itertools.product(*([(axis, value) for value, _ in levels] for axis, levels in sweep.levels.items()))
    wanted = [shown((*setting, ("seed", seed))) for seed, setting in itertools.product(sweep.seeds, list(grid))]
    results = [cells[name] for name in wanted if name in cells]
    if not results:
        raise ConfigError(f"{str(path)!r} is of another sweep: it has none of the cells beside it")
    return Archive(sweep, about.command, Table(results), [name for name in wanted if name not in cells], about.jobs == 1)


def measured(directory: str | Path) -> Table:
    """The table of a sweep's results or of a run, in its directory. Raises ConfigError for any other; DamagedError."""
    path = Path(directory)
    return read_sweep(path).table if holds_cells(path) else Table([read_run(RunDir.existing(path))])


def _read(path: Path) -> _Kept:
    try:
        return _Kept.model_validate_json(read_small(path))
    except ValidationError as error:
        raise DamagedError(
            f"{path} describes no sweep: {error.errors()[0]['msg']}. The same sweep command writes it again"
        ) from error
