"""What is shown of a sweep while it runs: how far its cell is, and how long the cell and the sweep will take."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from async_rlhf.experiments.staleness.progress import CellProgress, Pace, SweepProgress

HEAD = "cell 2/6: queue.max_staleness = 1, seed = 0"


def test_a_sweep_takes_what_is_left_of_a_cell_and_whole_cells_for_those_that_wait() -> None:
    pace = Pace(waiting=2)
    assert pace.left(None) == "", "one step is no pace"
    assert pace.left(10.0) == "0:00:10 left", "no cell has ended yet"
    pace.end(50.0)
    assert pace.left(20.0) == "0:00:20 left, 0:02:00 for the sweep"
    pace.waiting = 0
    assert pace.left(20.0) == "0:00:20 left, 0:00:20 for the sweep"


def test_cells_that_run_at_once_share_the_time_of_those_that_wait() -> None:
    pace = Pace(waiting=3, jobs=2)
    pace.end(50.0)
    assert pace.left(20.0) == "0:00:20 left, 0:02:00 for the sweep"


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = list[str](), iter([0.0, 2.0, 4.0, 20.0])
    monkeypatch.setattr("async_rlhf.experiments.staleness.progress.time.monotonic", lambda: next(clock))
    with SweepProgress(Pace(waiting=1), said.append, Console(file=io.StringIO())) as sweep:
        progress = CellProgress(HEAD, 30, sweep)
        progress.waiting({}, 4)
        for step in (1, 2, 3, 11):
            progress.step({"step": step}, 100)
        progress.event("actor-0 ended")
    assert said == [f"{HEAD}: step 2/30, 0:00:56 left", f"{HEAD}: step 11/30, 0:00:38 left", "    actor-0 ended"]


def test_a_terminal_gets_a_bar_with_the_cell_its_step_and_what_is_waited_for() -> None:
    file, said = io.StringIO(), list[str]()
    console = Console(file=file, force_terminal=True, width=160)
    with SweepProgress(Pace(waiting=0), said.append, console) as sweep:
        progress = CellProgress(HEAD, 30, sweep)
        progress.waiting({}, 4)
        sweep.bars.refresh()
        progress.step({"step": 7}, 100)
        sweep.bars.refresh()
        progress.close()
    shown = file.getvalue()
    assert HEAD in shown and "starting the processes" in shown and "7/30" in shown
    assert said == []
