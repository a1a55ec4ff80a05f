"""Virtual time: tasks that take seconds, what each role spends it on, and judges.

Events at the same time happen in the order in which they were decided, so that a simulation repeats to the last bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

BUSY = {"decode", "adopt", "train", "publish", "score"}
"""What a role does when it does not wait. A wait is named after what ends it: credit, weights, scores, batch, completions."""


class Task:
    """left: seconds of it at the time `at`."""

    __slots__ = ("at", "done", "entry", "left")

    def __init__(self, left: float, done: Callable[[], None], at: float) -> None:
        self.left, self.done, self.at, self.entry = left, done, at, -1


class Clock:
    """`now`: seconds. Owns the line of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._line: list[tuple[float, int, Task]] = []
        self._number = 0

    def begin(self, seconds: float, done: Callable[[], None]) -> Task:
        """done is called when so many seconds have passed."""
        task = Task(seconds, done, self.now)
        self._schedule(task)
        return task

    def left(self, task: Task) -> float:
        """Seconds that it still needs."""
        return max(0.0, task.left - (self.now - task.at))

    def shorten(self, task: Task, left: float) -> None:
        """From now on it needs `left` seconds."""
        task.left, task.at = left, self.now
        self._schedule(task)

    def turn(self) -> bool:
        """The next task ends; False where there is none."""
        while self._line:
            at, entry, task = heappop(self._line)
            if entry == task.entry:
                self.now, task.entry = at, -1
                task.done()
                return True
        return False

    def _schedule(self, task: Task) -> None:
        self._number += 1
        task.entry = self._number
        heappush(self._line, (self.now + task.left, self._number, task))


@dataclass(frozen=True)
class RoleTime:
    """shares: of the role's time, by what it does or waits for; they add up to 1."""

    shares: Mapping[str, float]

    @property
    def idle(self) -> float:
        return sum(share for doing, share in self.shares.items() if doing not in BUSY)

    @property
    def waits_for(self) -> str:
        """What most of its idle time ends by; "" where it never waits."""
        waits = {doing: share for doing, share in self.shares.items() if doing not in BUSY and share > 0}
        return max(waits, key=lambda doing: waits[doing], default="")


class Account:
    """What one role does, and the seconds of each since `restart`."""

    def __init__(self, clock: Clock, doing: str) -> None:
        self._clock, self._doing, self._since, self._seconds = clock, doing, clock.now, dict[str, float]()

    def turn_to(self, doing: str) -> None:
        """From now on it does this."""
        if doing != self._doing:
            self._add()
            self._doing = doing

    def restart(self) -> None:
        self._seconds, self._since = {}, self._clock.now

    def close(self) -> RoleTime:
        """What it does ends now."""
        self._add()
        total = sum(self._seconds.values())
        return RoleTime({doing: seconds / total for doing, seconds in self._seconds.items() if seconds > 0} if total else {})

    def _add(self) -> None:
        now = self._clock.now
        self._seconds[self._doing] = self._seconds.get(self._doing, 0.0) + now - self._since
        self._since = now


class Judges:
    """All of a run: each scores one completion at once, in the order in which completions come. number: of each owner, an
    actor, or of the whole run where that is the one owner; inf for no limit.

    load_s: seconds of the share of them that was busy, since `restart`; 0 without a limit.
    """

    def __init__(self, clock: Clock, account: Account, number: float, owners: int) -> None:
        self._clock, self._account, self._number = clock, account, number
        self._lines = [deque[tuple[float, Callable[[], None]]]() for _ in range(owners)]
        self._busy = [0] * owners
        self._load_s = self._since = 0.0

    def submit(self, owner: int, seconds: float, done: Callable[[], None]) -> None:
        """done is called when a completion has been scored for so long, at once where that takes no time."""
        if seconds == 0:
            done()
            return
        self._lines[owner].append((seconds, done))
        self._begin(owner)

    def restart(self) -> None:
        self._count()
        self._load_s = 0.0

    @property
    def load_s(self) -> float:
        self._count()
        return self._load_s

    def _begin(self, owner: int) -> None:
        while self._lines[owner] and self._busy[owner] < self._number:
            seconds, done = self._lines[owner].popleft()
            self._change(owner, 1)
            self._clock.begin(seconds, partial(self._ended, owner, done))

    def _ended(self, owner: int, done: Callable[[], None]) -> None:
        self._change(owner, -1)
        self._begin(owner)
        done()

    def _change(self, owner: int, busy: int) -> None:
        """So many more of them are busy, or fewer."""
        self._count()
        self._busy[owner] += busy
        self._account.turn_to("score" if any(self._busy) else "completions")

    def _count(self) -> None:
        if math.isfinite(self._number):
            self._load_s += sum(self._busy) / (self._number * len(self._busy)) * (self._clock.now - self._since)
        self._since = self._clock.now
