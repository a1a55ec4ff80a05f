"""Virtual time: tasks that take seconds, on shared cores or alone, and what each does when it ends.

Events at the same time happen in the order in which they were decided, so that a simulation repeats to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


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

    def cancel(self, task: Task) -> None:
        """It never ends."""
        task.entry = -1
        self._leave(task)

    def turn(self) -> bool:
        """The next task ends; False where there is none."""
        while self._line:
            at, entry, task = heappop(self._line)
            if entry == task.entry:
                self.now, task.entry = at, -1
                self._leave(task)
                task.done()
                return True
        return False

    def _schedule(self, task: Task) -> None:
        self._number += 1
        task.entry = self._number
        heappush(self._line, (self.now + task.left / task.rate, self._number, task))

    def _leave(self, task: Task) -> None:
        if task.cores is not None and task in task.cores.tasks:
            del task.cores.tasks[task]
            self._share(task.cores)

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
