"""One process of a run as its supervisor sees it: its start, its last beat and its deaths.

Decides when to start again, when to give up and when a process is frozen; what follows from it is for the caller, which passes
the time (`SupervisedTime`): the supervisor for roles, the `evaluator` for its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from async_rlhf.launch.program import Node, Process
from async_rlhf.launch.tether import PROGRESS

MAX_DEATHS = 6
"""A role that ends so often without having worked in between will not get better."""
_SAME_ERRORS = 2
"""A role that has never worked in this run ends no oftener than so by the same error."""
_MAX_PAUSE_S = 30.0
_WORKED_PAUSES = 10  # a life this many times longer than the pause before it was no failed start
_SILENT, _SILENT_WORKED_S = ("scorer", "relay"), 300.0  # roles that do not report progress
_LONGEST_LOOK_S = 1.0


class SupervisedTime:
    """Seconds in which the supervisor could look. Of a gap between two calls at most a second counts.

    A supervisor that was frozen, alone or with everything, finds no role late.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._passed = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._passed += min(now - self._last, _LONGEST_LOOK_S)
        self._last = now
        return self._passed


class Every:
    """A timer: true at the first call and then once every `seconds`."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds, self._now, self._due_at = seconds, now, now()

    def __call__(self) -> bool:
        if (now := self._now()) < self._due_at:
            return False
        self._due_at = now + self._seconds
        return True


class ProcessEnd(NamedTuple):
    code: int
    """As `Process.poll` returns it."""
    reason: str
    """The process's own reason; empty where it gave none."""


@dataclass
class Child:
    """A role is given up when `MAX_DEATHS` lives in a row were none in which it worked.

    It has worked in a life in which it has done something of what it is for, and which was ten times as long as the pause
    before it. So the steps of other roles reset no count of deaths, and pauses grow until a role works or is given up. One that
    has never worked in this run and ends by the same error twice in a row is given up at once.
    """

    node: Node
    process: Process | None = None
    wanted: bool = True
    """Whether it should be running."""
    optional: bool = False
    """Whether the run goes on when it is given up."""
    ended_well: bool = False
    """Whether it ended with code 0, and it is not known yet whether that was right."""
    deaths: int = 0
    has_worked: bool = False
    """Whether a process of its role has made progress in this run: then no error of it is one of the configuration."""
    start_at: float = 0.0
    _pause_s: float = 0.0
    _started_at: float = 0.0
    _ended_at: float | None = None
    _beat_at: float = 0.0
    _progress_at: float = 0.0
    _progressed: bool = False
    _error: str = ""
    _same_errors: int = 0
    _losses: int = 0
    _lost_for: str = ""

    def started(self, process: Process, now: float) -> None:
        self.process, self.ended_well = process, False
        self._started_at, self._ended_at, self._progressed = now, None, False
        self._beat_at = self._progress_at = now

    def beats(self, now: float) -> bytes:
        """The beats sent since the last call (`tether`)."""
        beats = b"" if self.process is None else self.process.read_beats()
        if beats:
            self._beat_at = now
        if PROGRESS in beats:
            self._progress_at = now
            self.progressed()
        return beats

    def end(self) -> ProcessEnd | None:
        """The end of the process, once it has ended."""
        code = None if self.process is None else self.process.poll()
        return None if self.process is None or code is None else ProcessEnd(code, self.process.failure_message())

    def progressed(self) -> None:
        self._progressed, self._losses, self._lost_for = True, 0, ""

    def silent_s(self, now: float) -> float:
        """Since its last beat."""
        return now - self._beat_at

    def idle_s(self, now: float) -> float:
        """Since its last progress."""
        return now - self._progress_at

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def ends_well(self, now: float) -> None:
        """It has ended with code 0: `died` follows, unless that was right."""
        self.process, self.ended_well, self.start_at, self._ended_at = None, True, now, now

    def given_up(self, max_deaths: int) -> bool:
        """Whether it is not to be started again."""
        return self.deaths >= max_deaths or (not self.has_worked and self._same_errors >= _SAME_ERRORS)

    def died(self, now: float, first_pause_s: float, error: str = "") -> float:
        """Counts this end; returns the pause before the next start, in seconds. error: by its own account, if it was one."""
        self._same_errors = 0 if not error else self._same_errors + 1 if error == self._error else 1
        self._error = error
        if self._worked(now if self._ended_at is None else self._ended_at):
            self.deaths = 0
        self.deaths += 1
        return self._waits(now, first_pause_s, self.deaths)

    def lost(self, now: float, first_pause_s: float, reason: str) -> tuple[float, bool]:
        """Its host cannot be reached: no death of its own. Returns the pause before the next start, and whether it is news."""
        if self._worked(now):
            self._losses, self._lost_for = 0, ""
        is_news, self._lost_for = reason != self._lost_for, reason
        self._losses += 1
        return self._waits(now, first_pause_s, self._losses), is_news

    def _waits(self, now: float, first_pause_s: float, times: int) -> float:
        """No process of the role lives. times: how often in a row."""
        self.process, self.ended_well, self._started_at, self._progressed = None, False, now, False
        self._pause_s = min(_MAX_PAUSE_S, first_pause_s * 2 ** min(times - 1, 16))
        self.start_at = now + self._pause_s
        return self._pause_s

    def _worked(self, until: float) -> bool:
        lived_s = until - self._started_at
        if self.node.role in _SILENT:
            return lived_s >= _SILENT_WORKED_S
        return self._progressed and lived_s >= _WORKED_PAUSES * self._pause_s
