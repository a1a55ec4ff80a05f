"""The sweep: runs every cell of the grid one after another, then tables, picture and report.

owns        nothing between two cells; a cell is a normal run in a directory of its own
waits for   the run of the cell
on Ctrl-C   the cell drains and saves; the same command goes on from there
Called by `async-rlhf sweep`, through the entry point in pyproject.toml. Never computes a number: that is `analyze`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments.staleness.analyze import CellResult, fingerprint, read_cell
from async_rlhf.experiments.staleness.config import Cell, SweepConfig, load_sweep
from async_rlhf.experiments.staleness.report import render, write_csv
from async_rlhf.launch.exit_codes import InterruptedRunError
from async_rlhf.launch.run_lock import holder
from async_rlhf.run.api import preflight, run
from async_rlhf.run.config import Config, differences
from async_rlhf.run.run_dir import RunDir

State = Literal["new", "unfinished", "finished"]
# How a run is watched changes no number of it.
_WATCHING = ("stall_timeout_s", "watchdog_s", "sampled_groups", "address", "output_dir")


def run_sweep(path: Path, say: Callable[[str], None] = typer.echo) -> bool:
    """Run what is left of the sweep in a TOML file and write results.csv, results.png and report.md beside its cells.

    True when every cell has finished; False when one was drained before its end (nothing is written then).
    Raises ConfigError before the first run for a sweep or a cell that cannot work, or a cell's directory that holds
    another configuration; and what ended a run otherwise (see `async_rlhf.launch.exit_codes`).
    """
    sweep, cells = load_sweep(path)
    states = [state_of(cell, preflight(cell.config)) for cell in cells]
    for number, (cell, state) in enumerate(zip(cells, states, strict=True), 1):
        head = f"cell {number}/{len(cells)}: {cell.label}"
        if state == "finished":
            say(f"{head}: finished before, skipped")
            continue
        say(f"{head}: resumed" if state == "unfinished" else head)
        if not _run_cell(cell, state, head, say):
            say(f"{head}: drained. The same command goes on here: async-rlhf sweep {path}")
            return False
        say(f"    {_summary(read_cell(cell.config.run_dir, tuple(cell.setting)))}")
    _write(sweep, path, [read_cell(cell.config.run_dir, tuple(cell.setting)) for cell in cells], say)
    return True


def state_of(cell: Cell, num_prompts: int) -> State:
    """How far the run of a cell has come.

    num_prompts: size of its training data, on which the number of its steps depends. Raises ConfigError when its
    directory holds another configuration, or is in use.
    """
    config = cell.config
    if not (config.run_dir / "config.toml").exists():
        return "new"
    directory = RunDir.existing(config.run_dir)
    _check_same(directory.config(), config)
    if directory.is_alive():
        raise ConfigError(f"cell {str(config.run_dir)!r} is being run by {holder(directory.lock_file)}; wait, or stop it")
    metrics = directory.read_metrics()
    num_steps = config.bound(num_prompts).num_groups // config.groups_per_batch
    evaluated = {record["label"] for record in directory.read_evaluations()}
    steps_done = metrics[-1]["step"] if metrics else 0
    return "finished" if steps_done >= num_steps and (not config.evaluation.at_end or "end" in evaluated) else "unfinished"


def _check_same(old: Config, new: Config) -> None:
    """A sweep compares runs, so every setting counts: also those that a resumed run may change."""
    if fingerprint(old, _WATCHING) == fingerprint(new, _WATCHING):
        return
    changed = [line for line in differences(old, new) if line.partition(":")[0] not in _WATCHING]
    raise ConfigError(
        f"cell {str(new.run_dir)!r} was run with other settings ({'; '.join(changed[:5]) or 'keys were removed'}). "
        "Restore them, choose another sweep.name, or remove the directory to run it again"
    )


def _run_cell(cell: Cell, state: State, head: str, say: Callable[[str], None]) -> bool:
    try:
        return run(cell.config, resume=state == "unfinished", quiet=True).finished
    except InterruptedRunError as error:
        raise InterruptedRunError(f"{head}: forced to end before it was drained; the same command resumes it") from error
    except AsyncRLHFError:
        say(f"{head}: ended in {cell.config.run_dir}; finished cells are kept, the same command goes on here")
        raise


def _summary(result: CellResult) -> str:
    """One finished cell in a line."""
    reward = f"reward {result.reward_last_quarter:.3f} over the last quarter" if result.reward_last_quarter is not None else ""
    start, end = result.held_out_start.reward, result.held_out_end.reward
    if end is not None:
        reward = f"held-out reward {'' if start is None else f'{start:.3f} -> '}{end:.3f}"
    staleness = f"staleness {result.staleness_mean:.2f} (max {result.staleness_max}, bound {result.bound})"
    return f"{result.steps} steps in {result.wall_s:.0f} s, {reward}, {staleness}"


def _write(sweep: SweepConfig, path: Path, results: Sequence[CellResult], say: Callable[[str], None]) -> None:
    """Tables and picture; without matplotlib everything but the picture."""
    directory = sweep.directory
    write_csv(results, directory / "results.csv")
    picture: str | None = "results.png"
    try:
        from async_rlhf.experiments.staleness.plot import draw

        draw(results, sweep.name, directory / "results.png")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        picture = None
        say("no picture: matplotlib is not installed. pip install 'async-rlhf[experiments]', then the same command draws it")
    (directory / "report.md").write_text(render(sweep, path, results, picture))
    say(f"report: {directory / 'report.md'}")
