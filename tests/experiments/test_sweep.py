"""A real sweep of tiny runs, end to end: run, skip, resume, drain, draw."""

from __future__ import annotations

import csv
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments.reports.command import report
from async_rlhf.experiments.staleness.sweep import CellProgress, Pace, run_sweep
from async_rlhf.run.run_dir import RunDir
from tests.conftest import wait_for
from tests.experiments.written import write_sweep

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Path]:
    """Writes a sweep over max_staleness with one seed; returns its file."""
    return partial(write_sweep, tmp_path, seeds=[3])


def table(directory: Path) -> list[dict[str, str]]:
    """Rows of results.csv."""
    return list(csv.DictReader((directory / "results.csv").read_text().splitlines()))


def test_a_sweep_runs_its_cells_then_skips_them_and_draws_when_it_can(sweep: Callable[..., Path], tmp_path: Path) -> None:
    path = sweep([0, 1], **{"max_steps": 9, "evaluation.at_end": True, "hooks.command": ["true", "T0-SECRET"]})
    said, directory = list[str](), tmp_path / "sweeps" / "tiny"
    assert run_sweep(path, ["max_steps=2"], said.append)
    assert said[0] == "cell 1/2: queue.max_staleness = 0, seed = 3"
    assert said[1].strip().startswith("2 steps in ") and "staleness 0.00 (max 0, bound 0)" in said[1]
    assert said[2] == "cell 2/2: queue.max_staleness = 1, seed = 3"
    rows = table(directory)
    numbers = [[row[name] for name in ("queue.max_staleness", "seed", "steps", "trained_samples")] for row in rows]
    assert numbers == [["0", "3", "2", "32"], ["1", "3", "2", "32"]]
    assert all(row["held_out_reward_end"] and row["held_out_accuracy_end"] for row in rows)
    for name in ("results", "trade_offs"):
        assert (directory / f"{name}.png").read_bytes().startswith(PNG)
    page = (directory / "report.md").read_text()
    assert f"    async-rlhf sweep {path} --set max_steps=2\n" in page
    assert "hooks.command = " in page and "T0-SECRET" not in page
    assert "**FAILS**" not in page and "bound 0 is staleness 0 for every token (1 of 1 cell)" in page
    report(directory, said.append)
    assert (directory / "report.md").read_text() == page, "from what is on disk the same page is made again"

    shutil.rmtree(directory / "queue.max_staleness-0_seed-3")
    said.clear()
    assert run_sweep(path, ["max_steps=2"], said.append)
    assert said[0] == "cell 1/2: queue.max_staleness = 0, seed = 3: finished before, skipped"
    assert said[1] == "cell 2/2: queue.max_staleness = 1, seed = 3: finished before, skipped"
    assert table(directory) == rows, "what a cell measured outlives its run"

    with pytest.raises(ConfigError, match=r"seed-3.json' is of a run with other settings \(max_steps: 2 -> 9\)"):
        run_sweep(path, say=said.append)
    (directory / "cells" / "queue.max_staleness-0_seed-3.json").unlink()
    with pytest.raises(ConfigError, match=r"seed-3' is of a run with other settings \(max_steps: 2 -> 9\)"):
        run_sweep(path, say=said.append)


@pytest.mark.rest
def test_cells_run_at_once_and_one_that_fails_is_named_beside_the_others(tmp_path: Path, sweep: Callable[..., Path]) -> None:
    path, said = sweep([0], max_steps=2), list[str]()
    (tmp_path / "judge.py").write_text("def good(completion):\n    return 0.5\n\ndef bad(completion):\n    return 1 / 0\n")
    judge = f'[sweep.axes.judge]\ngood = {{ rewards.functions = ["{tmp_path}/judge.py:good"] }}\n'
    path.write_text(path.read_text() + "\n" + judge + judge.splitlines()[1].replace("good", "bad") + "\n")
    assert not run_sweep(path, (), said.append, only=["judge=good"], dry_run=True)
    assert said == ["cell 1/2: judge = good, queue.max_staleness = 0, seed = 3: new, 2 steps"]
    with pytest.raises(AsyncRLHFError, match=r"1 of 2 cells failed, .* judge = bad, .*ZeroDivisionError"):
        run_sweep(path, (), said.append, jobs=2)
    rows = {row["judge"]: row for row in table(tmp_path / "sweeps" / "tiny")}
    assert rows["good"]["steps"] == "2" and set(rows) == {"good"}
    page = (tmp_path / "sweeps" / "tiny" / "report.md").read_text()
    assert "**1 of 2 cells have no result: judge = bad, queue.max_staleness = 0, seed = 3.**" in page
    with pytest.raises(ConfigError, match="--only 'judge=god': the sweep has no such value; choose among good, bad"):
        run_sweep(path, (), said.append, only=["judge=god"])


def test_cells_that_end_by_time_do_not_run_at_once(sweep: Callable[..., Path]) -> None:
    path = sweep([0], max_seconds=5)
    with pytest.raises(ConfigError, match=r"--jobs 2: cells that end by time .* would take it from each other"):
        run_sweep(path, jobs=2, dry_run=True)


@pytest.mark.rest
def test_an_interrupt_drains_the_cell_and_the_sweep_and_the_cell_can_be_resumed(
    sweep: Callable[..., Path], command: Callable[..., Any], tmp_path: Path
) -> None:
    path, directory = sweep([0, 1]), tmp_path / "sweeps" / "tiny"
    first = RunDir(directory / "queue.max_staleness-0_seed-3")
    started = command("sweep", str(path), "--jobs", "1", "--set", "max_steps=300")
    wait_for(first.read_metrics, "the first step")
    started.process.send_signal(signal.SIGINT)
    code, output = started.finish()
    assert code == 0, output
    again = f"async-rlhf sweep {path} --set max_steps=300 --jobs 1"
    assert f"drained: 2 of 2 cells are left. The same command goes on here: {again}" in output
    steps_done = len(first.read_metrics())
    assert 0 < steps_done < 300
    assert not list(directory.glob("results*")) and not list(directory.glob("*-1_seed-3"))

    code, output = command("sweep", str(sweep([0], max_steps=300))).finish()
    assert code == 0, output
    assert "cell 1/1: queue.max_staleness = 0, seed = 3: resumed" in output
    assert [record["step"] for record in first.read_metrics()] == list(range(1, 301))
    assert [row["steps"] for row in table(directory)] == ["300"]


def test_a_sweep_takes_what_is_left_of_a_cell_and_whole_cells_for_those_that_wait() -> None:
    pace = Pace(waiting=2)
    assert pace.left(None) == "", "one step is no pace"
    assert pace.left(10.0) == "0:00:10 left", "no cell has ended yet"
    pace.end(50.0)
    assert pace.left(20.0) == "0:00:20 left, 0:02:00 for the sweep"
    pace.waiting, pace.jobs = 3, 2
    assert pace.left(20.0) == "0:00:20 left, 0:02:00 for the sweep", "those that run at once share the time"


def test_a_sweep_prints_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = list[str](), iter([0.0, 2.0, 4.0, 20.0])
    monkeypatch.setattr("async_rlhf.experiments.staleness.sweep.time", SimpleNamespace(monotonic=lambda: next(clock)))
    head = "cell 2/6: queue.max_staleness = 1, seed = 0"
    progress = CellProgress(head, 30, Pace(waiting=1), said.append)
    for step in (1, 2, 3, 11):
        progress.step({"step": step}, 100)
    progress.event("actor-0 ended")
    assert said == [f"{head}: step 2/30, 0:00:56 left", f"{head}: step 11/30, 0:00:38 left", "    actor-0 ended"]
