"""How far a sweep is: a bar a cell on a terminal, a line now and then in a log, and the time left.

owns        the bars of the cells that run; between cells the terminal is free
waits for   nothing; called by the supervisors of the runs, each from its own thread
Called by `sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from async_rlhf.run.display import progress
from async_rlhf.run.display.console import StepPace, beginning, duration
from async_rlhf.run.run_files import printable

# A log that is read later wants a line now and then, not one a step.
_LINE_EVERY_S = 15.0


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


class SweepProgress:
    """Shows the cells that run; a context manager, so that the bars are gone whatever happens. say: prints a line where there
    is no terminal."""

    def __init__(self, pace: Pace, say: Callable[[str], None], console: Console | None = None) -> None:
        self.pace, self._plain = pace, say
        self._console = console or Console(highlight=False, soft_wrap=True)
        texts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[state]}"))
        self.bars = Progress(BarColumn(20), MofNCompleteColumn(), *texts, console=self._console, transient=True,
                             disable=not self._console.is_terminal)  # fmt: skip

    def __enter__(self) -> SweepProgress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(printable(text), markup=False)
        else:
            self._plain(printable(text))


class CellProgress(progress.Progress):
    """Of one cell. head: which of how many, and its settings."""

    def __init__(self, head: str, num_steps: int, sweep: SweepProgress) -> None:
        self._head, self._num_steps, self._sweep = head, num_steps, sweep
        self._steps, self._last_line = StepPace(), float("-inf")
        self._bar = sweep.bars.add_task(head, total=num_steps, state="")

    def close(self) -> None:
        self._sweep.bars.remove_task(self._bar)

    def event(self, text: str) -> None:
        self._sweep.say(f"    {text}" if self._sweep.pace.jobs == 1 else f"    {self._head}: {text}")

    def waiting(self, status: dict[str, Any], wanted: int) -> None:
        self._sweep.bars.update(self._bar, state=beginning(status, wanted)[0])

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        now, step = time.monotonic(), record["step"]
        last = self._num_steps if max_steps is None else min(self._num_steps, max_steps)
        left = self._sweep.pace.left(self._steps.left_s(step, last, now))
        self._sweep.bars.update(self._bar, completed=step, total=last, state=left)
        if self._sweep.bars.disable and left and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._sweep.say(f"{self._head}: step {step}/{last}, {left}")
