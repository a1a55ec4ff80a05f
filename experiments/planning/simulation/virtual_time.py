"""Virtual time: tasks that take seconds, on shared cores or alone, what each role spends it on, and judges.

Events at the same time happen in the order in which they were decided, so that a simulation repeats to the last bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

BUSY = {"decode", "adopt", "train", "publish", "score"}
"""What a role does when it does not wait. A wait is named after what ends it: credit, weights, scores, batch, completions."""


class Cores:
    """A pool; see `workload.Pool` for the model."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.tasks: dict[Task, None] = {}  # in the order in which they began
        self.is_short = False

    def level(self) -> float:
        """Cores that a task gets at most, where it wants more: the largest level that the pool can give to all."""
        left, tasks = self.number, sorted(task.parallelism for task in self.tasks)
        for place, wanted in enumerate(tasks):
            if wanted * (len(tasks) - place) >= left:
                return left / (len(tasks) - place)
            left -= wanted
        return max(tasks, default=0.0)


class Task:
    """left: seconds of it, were it alone, at the time `at`; rate: of these a second."""

    __slots__ = ("at", "cores", "done", "entry", "left", "parallelism", "rate")

    def __init__(self, left: float, done: Callable[[], None], cores: Cores | None, parallelism: float, at: float) -> None:
        self.left, self.done, self.cores, self.parallelism, self.at = left, done, cores, parallelism, at
        self.rate, self.entry = 1.0, -1


class Clock:
    """`now`: seconds. Owns the line of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._line: list[tuple[float, int, Task]] = []
        self._number = 0

    def begin(self, seconds: float, done: Callable[[], None], cores: Cores | None = None, parallelism: float = 1.0) -> Task:
        """done is called when the task has had so many seconds, as long as it is alone. cores: None for devices of its own."""
        task = Task(seconds, done, cores, parallelism, self.now)
        self._schedule(task)
        if cores is not None:
            cores.tasks[task] = None
            self._share(cores)
        return task

    def left(self, task: Task) -> float:
        """Seconds alone that it still needs."""
        return max(0.0, task.left - (self.now - task.at) * task.rate)

    def shorten(self, task: Task, left: float) -> None:
        """From now on it needs `left` seconds alone."""
        task.left, task.at = left, self.now
        self._schedule(task)

    def turn(self) -> bool:
        """The next task ends; False where there is none."""
        while self._line:
            at, entry, task = heappop(self._line)
            if entry == task.entry:
                self.now, task.entry = at, -1
                if task.cores is not None:
                    del task.cores.tasks[task]
                    self._share(task.cores)
                task.done()
                return True
        return False

    def _schedule(self, task: Task) -> None:
        self._number += 1
        task.entry = self._number
        heappush(self._line, (self.now + task.left / task.rate, self._number, task))

    def _share(self, cores: Cores) -> None:
        short = sum(task.parallelism for task in cores.tasks) > cores.number
        if not short and not cores.is_short:
            return
        cores.is_short, level = short, cores.level()
        for task in cores.tasks:
            rate = min(1.0, level / task.parallelism)
            if rate != task.rate:
                task.left, task.at, task.rate = self.left(task), self.now, rate
                self._schedule(task)


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

    def __init__(
        self, clock: Clock, account: Account, cores: Cores | None, parallelism: float, number: float, owners: int
    ) -> None:
        self._clock, self._account, self._cores, self._parallelism = clock, account, cores, parallelism
        self._number = number
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
            self._clock.begin(seconds, lambda done=done: self._ended(owner, done), self._cores, self._parallelism)  # type: ignore[misc]

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
