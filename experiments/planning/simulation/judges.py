"""Judges on virtual time: each scores one completion at once, in the order in which completions come."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from async_rlhf.experiments.planning.simulation.account import Account
from async_rlhf.experiments.planning.simulation.virtual_time import Clock, Cores


class Scoring:
    """The role of all judges of the run. load_s: seconds of the share of them that was busy, since `restart`."""

    def __init__(self, clock: Clock, account: Account, cores: Cores | None, parallelism: float) -> None:
        self.clock, self.cores, self.parallelism = clock, cores, parallelism
        self._account = account
        self._busy, self._judges = 0, 0.0
        self._load_s = self._since = 0.0

    def add_judges(self, number: float) -> None:
        """So many more judges, or fewer; without a limit they have no load."""
        self._count()
        self._judges += 0 if math.isinf(number) else number

    def change(self, busy: int) -> None:
        """So many more of them are busy, or fewer."""
        self._count()
        self._busy += busy
        self._account.turn_to("score" if self._busy else "completions", self.clock.now)

    def restart(self) -> None:
        self._count()
        self._load_s = 0.0

    @property
    def load_s(self) -> float:
        self._count()
        return self._load_s

    def _count(self) -> None:
        now = self.clock.now
        if self._busy and self._judges:
            self._load_s += min(1.0, self._busy / self._judges) * (now - self._since)
        self._since = now


class Judges:
    """Those of one actor, or of the run. number: inf for no limit."""

    def __init__(self, scoring: Scoring, number: float) -> None:
        self._scoring, self._number = scoring, number
        self._line = deque[tuple[float, Callable[[], None]]]()
        self._busy = 0
        scoring.add_judges(number)

    def submit(self, seconds: float, done: Callable[[], None]) -> None:
        """done is called when a completion has been scored for so long, at once where that takes no time."""
        if seconds == 0:
            done()
            return
        self._line.append((seconds, done))
        self._begin()

    def end(self) -> None:
        """They are gone with their actor; what they score is of no use to it."""
        self._line.clear()
        self._scoring.add_judges(-self._number)

    def _begin(self) -> None:
        while self._line and self._busy < self._number:
            seconds, done = self._line.popleft()
            self._busy += 1
            self._scoring.change(1)
            scoring = self._scoring
            scoring.clock.begin(seconds, lambda done=done: self._ended(done), scoring.cores, scoring.parallelism)  # type: ignore[misc]

    def _ended(self, done: Callable[[], None]) -> None:
        self._busy -= 1
        self._scoring.change(-1)
        self._begin()
        done()
