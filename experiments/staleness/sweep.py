"""The sweep: runs every cell of the grid, then tables, picture and report.

owns        a thread for each cell that runs; a cell is a normal run in a directory of its own, of this machine (`Here`) or of
            a node of a Ray cluster (`on_ray`)
waits for   the runs
on Ctrl-C   the cells that run drain and save; the same command goes on from there. A second one forces them to end
Called by `async-rlhf sweep`, through the entry point in pyproject.toml. It computes no number: `table` and `outcomes` do.

A cell that failed has no result and is tried again by the same command; the others go on.
"""

from __future__ import annotations

import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, did_you_mean
from async_rlhf.experiments.staleness.archive import keep_sweep, read_sweep
from async_rlhf.experiments.staleness.cells import WATCHING, CellResult, given, keep, kept, read_cell
from async_rlhf.experiments.staleness.config import Cell, SweepConfig, load_sweep
from async_rlhf.experiments.staleness.report import write
from async_rlhf.experiments.staleness.table import Table
from async_rlhf.launch.exit_codes import InterruptedRunError
from async_rlhf.launch.run_lock import holder
from async_rlhf.learner.loop.budget import Spent
from async_rlhf.learner.model.gguf import model_directory
from async_rlhf.preparation import prepare, with_reward_settings
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import masked
from async_rlhf.run.display import Progress
from async_rlhf.run.display.console import StepPace, duration
from async_rlhf.run.display.terminal import on_signals
from async_rlhf.run.hosts.connections import check_ray
from async_rlhf.run.loading import parse_override
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import printable
from async_rlhf.run.supervision.supervisor import Supervisor

State = Literal["new", "unfinished", "finished"]
_LINE_EVERY_S = 15.0


@dataclass(frozen=True)
class Job:
    """A cell and where it stands. num_prompts: of its training data."""

    cell: Cell
    head: str
    num_prompts: int
    kept: Path

    def state(self) -> State:
        """Raises ConfigError for a cell that was run with other settings, or is being run."""
        found = self.of_run()
        return found if self.result() is None else "finished"

    def result(self) -> CellResult | None:
        """The measurements of the cell in an earlier start. Raises ConfigError where it had other settings, DamagedError."""
        found = kept(self.kept)
        if found is not None:
            _check_same(self.kept, found.settings, self.cell.config)
        return found

    @property
    def num_steps(self) -> int:
        """Most steps of a whole run, which ends before `max_steps` where the data does."""
        config = self.cell.config
        return config.bound(self.num_prompts).num_groups // config.groups_per_batch

    def of_run(self) -> State:
        """How far its run directory has come. Raises ConfigError when it holds another configuration, or is in use."""
        config = self.cell.config
        if not (config.run_dir / "config.toml").exists():
            return "new"
        directory = RunDir.existing(config.run_dir)
        _check_same(config.run_dir, given(directory.config()), config)
        if directory.is_alive():
            raise ConfigError(f"cell {str(config.run_dir)!r} is being run by {holder(directory.lock_file)}; wait, or stop it")
        evaluated = {record["label"] for record in directory.read_evaluations() if "missing" not in record}
        metrics = directory.read_metrics()
        spent = Spent.until(metrics[-1] if metrics else {})
        done = spent.steps >= self.num_steps or config.budget.ended(spent)
        return "finished" if done and (not config.evaluation.at_end or "end" in evaluated) else "unfinished"


Outcome = CellResult | str
"""How a cell's run ended: what it measured, or why it ended before its last step."""


class Cells(Protocol):
    """Where cells run: in this process (`Here`), or on the nodes of a cluster (`on_ray.Nodes`)."""

    at_once: int
    """Cells that can run at once."""

    def run(self, job: Job, progress: Progress) -> Outcome | None:
        """Begin a cell's run or go on with it; None when it has drained, or was forced to end. Called by a thread a cell."""
        ...

    def interrupt(self) -> None:
        """As a signal does: the first drains all cells, the second forces them to end; also those that begin after it."""
        ...


def run_sweep(
    path: Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = typer.echo,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    only: Sequence[str] = (),
    dry_run: bool = False,
) -> bool:
    """Run what is left of a sweep and write its tables, pictures and pages beside its cells (`report`).

    path: a TOML file, or the name of a shipped sweep. overrides: `KEY=VALUE` of `--set`. jobs: cells that run at once; one if
    it is left out, with ray one a node. ray: address of the cluster that runs them. only: `AXIS=VALUE`; others are left for
    later. dry_run: say what would be run, and run nothing. True when every cell has ended; False when some are left (no
    report is written then). Raises ConfigError before the first run for a sweep or a cell that cannot work, or a cell's
    directory that holds another configuration; InterruptedRunError; AsyncRLHFError naming the cells that failed, when all
    others have ended and the report is written.
    """
    sweep, cells = load_sweep(path, dict(parse_override(text) for text in overrides))
    wanted = _wanted(sweep, cells, only)
    all_jobs = _jobs(sweep, cells, is_here=ray is None)
    states = {job.head: job.state() for job in all_jobs}
    place = _cells(ray, jobs, all_jobs)
    mine = [job for job in all_jobs if job.cell in wanted]
    for job in mine:
        if dry_run:
            most = "at most " if job.cell.config.budget.may_cut_steps else ""
            say(f"{job.head}: {states[job.head]}, {most}{job.num_steps} steps")
        elif states[job.head] == "finished":
            say(f"{job.head}: finished before, skipped")
    if dry_run:
        return False
    sets = (f"{key}={masked(key.strip(), value, Config)}" for key, _, value in (text.partition("=") for text in overrides))
    command = shlex.join(["async-rlhf", "sweep", str(path), *(word for text in sets for word in ("--set", text))])
    again = command + ("" if ray is None else f" --ray {shlex.quote(ray)}") + ("" if jobs is None else f" --jobs {jobs}")
    with place as where:
        keep_sweep(sweep, command, where.at_once)
        ended, signals = _run_all(where, [job for job in mine if states[job.head] != "finished"], states, say)
    left = [head for head, state in states.items() if state != "finished" and ended.get(head) is None]
    failures = {head: outcome for head, outcome in ended.items() if isinstance(outcome, str)}
    if signals > 1:
        raise InterruptedRunError(f"forced to end before the cells had drained; this goes on: {again}")
    if left:
        drained = "drained: " if signals else ""
        say(f"{drained}{len(left)} of {len(cells)} cells are left. The same command goes on here: {again}")
        return False
    if measured := [job for job in all_jobs if job.head not in failures]:
        for job in measured:
            if job.result() is None:  # only its run was left
                keep(read_cell(job.cell), job.kept)
        *_, markdown, _ = write(read_sweep(sweep.results_dir), sweep.results_dir, say)
        say(f"report: {markdown}")
    if failures:
        text = "; ".join(f"{head}: {reason}" for head, reason in failures.items())
        raise AsyncRLHFError(f"{len(failures)} of {len(cells)} cells failed, and the same command tries them again: {text}")
    return True


class Here:
    """Cells as runs of this machine, with a supervisor each. Raises ConfigError for more at once than there are CPUs."""

    def __init__(self, at_once: int = 1) -> None:
        cores = os.cpu_count() or 1
        if not 1 <= at_once <= cores:
            raise ConfigError(f"--jobs {at_once}: this machine has {cores} CPUs; choose 1 to {cores}")
        self.at_once = at_once
        self._signals = 0
        self._supervisors = set[Supervisor]()
        self._beginning = threading.Lock()

    def run(self, job: Job, progress: Progress) -> Outcome | None:
        config = job.cell.config
        try:
            resume = job.of_run() != "new"
            with self._beginning:  # one at a time: it reads the model, and may convert it
                supervisor, _ = prepare(config, resume=resume, progress=progress)
                self._supervisors.add(supervisor)
                for _ in range(self._signals):
                    supervisor.interrupt()
            return read_cell(job.cell) if supervisor.run() else None
        except InterruptedRunError:
            return None
        except AsyncRLHFError as error:
            progress.event(f"failed in {config.run_dir}: {error}")
            return str(error)

    def interrupt(self) -> None:
        self._signals += 1
        for supervisor in list(self._supervisors):
            supervisor.interrupt()


@dataclass
class Pace:
    """How long a sweep will still take. waiting: cells that have not begun. jobs: how many run at once."""

    waiting: int
    jobs: int = 1
    _whole_s: float = 0.0
    _num_whole: int = 0

    def end(self, seconds: float) -> None:
        """A cell has run from its beginning to its end."""
        self._whole_s, self._num_whole = self._whole_s + seconds, self._num_whole + 1

    def left(self, cell_s: float | None) -> str:
        """cell_s: of one cell that runs, where its pace is known. Of the sweep once a whole cell has ended."""
        if cell_s is None:
            return ""
        found = f"{duration(cell_s)} left"
        if self._num_whole:
            found += f", {duration(cell_s + self._whole_s / self._num_whole * -(-self.waiting // self.jobs))} for the sweep"
        return found


class CellProgress(Progress):
    """The progress of one cell. head: which of how many, and its settings. say: prints a line."""

    def __init__(self, head: str, num_steps: int, pace: Pace, say: Callable[[str], None]) -> None:
        self._head, self._num_steps, self._pace, self._say = head, num_steps, pace, say
        self._steps, self._last_line = StepPace(), float("-inf")

    def event(self, text: str) -> None:
        self._say(printable(f"    {text}" if self._pace.jobs == 1 else f"    {self._head}: {text}"))

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        now, step = time.monotonic(), record["step"]
        last = self._num_steps if max_steps is None else min(self._num_steps, max_steps)
        left = self._pace.left(self._steps.left_s(step, last, now))
        if left and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._say(f"{self._head}: step {step}/{last}, {left}")


def _run_all(
    cells: Cells, jobs: Sequence[Job], states: Mapping[str, State], say: Callable[[str], None]
) -> tuple[dict[str, Outcome | None], int]:
    """Run them. By their heads how they ended, None where they have not; and how many signals came, which reach the cells that
    run and those that begin later."""
    signals, pace = 0, Pace(waiting=len(jobs), jobs=cells.at_once)

    def take(*_: object) -> None:
        nonlocal signals
        signals += 1
        cells.interrupt()

    def run(job: Job) -> Outcome | None:
        if signals:
            return None
        state = states[job.head]
        say(f"{job.head}: resumed" if state == "unfinished" else job.head)
        pace.waiting -= 1
        began, progress = time.monotonic(), CellProgress(job.head, job.num_steps, pace, say)
        outcome = cells.run(job, progress)
        if isinstance(outcome, CellResult):
            if state == "new":
                pace.end(time.monotonic() - began)
            keep(outcome, job.kept)
            progress.event(_summary(outcome))
        return outcome

    with on_signals(take), ThreadPoolExecutor(cells.at_once) as threads:
        ended = dict(zip((job.head for job in jobs), threads.map(run, jobs), strict=True))
    return ended, signals


def _jobs(sweep: SweepConfig, cells: Sequence[Cell], *, is_here: bool) -> list[Job]:
    """is_here: whether they will be run on this machine. Raises ConfigError for a cell that cannot be run."""
    return [Job(cell, f"cell {number}/{len(cells)}: {cell.label}", preflight(cell.config, is_here=is_here).num_prompts,
                sweep.kept(cell.config.name)) for number, cell in enumerate(cells, 1)]  # fmt: skip


def _cells(ray: str | None, jobs: int | None, all_jobs: Sequence[Job]) -> AbstractContextManager[Cells]:
    """Where they run. Raises ConfigError where they cannot."""
    if ray is None:
        if jobs not in (None, 1) and any(job.cell.config.max_seconds is not None for job in all_jobs):
            raise ConfigError(
                f"--jobs {jobs}: cells that end by time (max_seconds) would take it from each other; run them one at a time, "
                "or on the nodes of a Ray cluster (--ray)"
            )
        return nullcontext(Here(1 if jobs is None else jobs))
    check_ray("--ray", ray, "the cells run here, --jobs N at once")
    from async_rlhf.experiments.staleness.on_ray import nodes

    return nodes(ray, jobs, all_jobs)


def _wanted(sweep: SweepConfig, cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    axes = {axis: [str(value) for value, _ in levels] for axis, levels in sweep.levels.items()}
    axes["seed"] = [str(seed) for seed in sweep.seeds]
    for text in only:
        axis, equals, value = text.partition("=")
        if not equals or axis not in axes:
            raise ConfigError(f"--only {text!r} is no AXIS=VALUE: {did_you_mean(axis, axes)}")
        if value not in axes[axis]:
            raise ConfigError(f"--only {text!r}: the sweep has no such value; choose among {', '.join(axes[axis])}")
        cells = [cell for cell in cells if str({**cell.setting, "seed": cell.config.seed}[axis]) == value]
    return list(cells)


def _check_same(place: Path, old: Mapping[str, Any], config: Config) -> None:
    """A sweep compares runs, so every setting counts: also those that a resumed run may change. old: of what lies in `place`,
    as `given`. Raises ConfigError."""
    new = given(with_reward_settings(config.model_copy(update={"model": model_directory(config.model)})))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in WATCHING]
    if keys:
        changed = "; ".join(f"{key}: {old.get(key, 'default')!r} -> {new.get(key, 'default')!r}" for key in keys[:5])
        raise ConfigError(
            f"{str(place)!r} is of a run with other settings ({changed}). Restore them, those of --set too; or keep both "
            "sweeps, with --set sweep.name=NAME; or remove it and run the cell again"
        )


def _summary(result: CellResult) -> str:
    """One finished cell in a line."""
    cell, start, end = Table([result]).cells.loc[0], result.held_out_start.reward, result.held_out_end.reward
    reward = ""
    if end is not None:
        reward = f"held-out reward {'' if start is None else f'{start:.3f} -> '}{end:.3f}, "
    elif not math.isnan(last := cell["reward_last_quarter"]):
        reward = f"reward {last:.3f} over the last quarter, "
    staleness = f"staleness {cell['staleness_mean']:.2f} (max {result.staleness_max}, bound {result.bound})"
    return f"{cell['steps']} steps in {cell['wall_s']:.0f} s, {reward}{staleness}"
