"""How far a sweep is: what happens to its cells, a line now and then, and the time left.

waits for   nothing; called by the supervisors of the runs, each from its own thread
Called by `sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_rlhf.run.display import Progress
from async_rlhf.run.display.console import StepPace, duration
from async_rlhf.run.run_files import printable

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


class CellProgress(Progress):
    """Of one cell. head: which of how many, and its settings. say: prints a line."""

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
