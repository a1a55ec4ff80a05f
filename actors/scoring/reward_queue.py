"""The lane of one reward: who is called next, when, with whom together, and whether to try again. Pure: no clock, no thread.

    task -> waiting -> (batched) -> concurrency -> requests and tokens per minute -> a call
                ^                                                                      |
                +----------- after a pause, when the cause may pass and tries are left +--> an answer

Time is an argument. Trying again is decided here and not around the function, so that a call that waits for its next try
holds no worker, obeys the limits, and its time-out counts each try alone.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from async_rlhf.actors.rewards import Answer, RewardSpec

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


@dataclass
class Task:
    """What a reward is asked about one completion, or about one whole group.

    members: one completion, or all of a group. tokens: what it will probably cost. tries: calls already made. stream: by which
    name it was shown before it ended.
    """

    id: int
    members: tuple[Mapping[str, Any], ...]
    tokens: int = 0
    tries: int = 0
    stream: int | None = None
    not_before: float = -math.inf
    waits_since: float = 0.0


class Lane:
    """See the module docstring. `offer`, `due` and `ended` are called by one thread."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._waiting: deque[Task] = deque()
        self._again: list[Task] = []
        self._num_running = 0
        self._requests = None if spec.requests_per_minute is None else WindowLimit(spec.requests_per_minute)
        self._tokens = None if spec.tokens_per_minute is None else WindowLimit(spec.tokens_per_minute)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self._waiting or self._num_running)

    def offer(self, task: Task, now: float) -> None:
        """Take a task in."""
        task.waits_since = now
        self._waiting.append(task)

    def discard(self, task_ids: set[int]) -> None:
        """Forget tasks that nobody waits for any more; those that run are not touched."""
        self._waiting = deque(task for task in self._waiting if task.id not in task_ids)
        self._again = [task for task in self._again if task.id not in task_ids]

    def due(self, now: float) -> list[tuple[Task, ...]]:
        """What is to be called now, each entry in one call. A task that could never be called is left for `impossible`."""
        self._return_paused(now)
        calls = []
        while self._free() and self._ripe_at(now) <= now:
            batch = tuple(itertools.islice(self._waiting, self._spec.batch_size))
            cost = _cost(batch)
            if self._allowed_at(now, cost) > now:
                break
            for task in batch:
                self._waiting.popleft()
                task.tries += 1
            self._charge(now, cost)
            self._num_running += 1
            calls.append(batch)
        return calls

    def next_due(self, now: float) -> float:
        """The earliest time at which `due` may have something without anything else happening; infinity for never."""
        paused = min((task.not_before for task in self._again), default=math.inf)
        if not self._waiting or not self._free():
            return paused
        batch = itertools.islice(self._waiting, self._spec.batch_size)
        return min(paused, max(self._ripe_at(now), self._allowed_at(now, _cost(batch))))

    def impossible(self) -> list[tuple[Task, Answer]]:
        """Takes out the tasks that cost more than a whole minute's tokens, with the reason."""
        if self._tokens is None:
            return []
        limit = self._tokens.limit
        found = [task for task in self._waiting if task.tokens > limit]
        for task in found:
            self._waiting.remove(task)
        return [(t, Answer(None, f"needs {t.tokens} tokens, tokens_per_minute allows {limit:.0f}")) for t in found]

    def ended(self, batch: Sequence[Task], answers: Sequence[Answer], now: float) -> list[tuple[Task, Sequence[Answer]]]:
        """The tasks of a call that are answered for good; the others are tried again later.

        answers: as many as members in all, or one for all of them.
        """
        self._num_running -= 1
        self._correct(batch, answers, now)
        final: list[tuple[Task, Sequence[Answer]]] = []
        start = 0
        for task in batch:
            own = answers if len(answers) == 1 else answers[start : start + len(task.members)]
            start += len(task.members)
            pauses = [answer.retry_after_s for answer in own if answer.retry_after_s is not None]
            if pauses and task.tries <= self._spec.retries:
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (task.tries - 1))
                task.not_before = now + max(pause, *pauses)
                self._again.append(task)
            else:
                final.append((task, own))
        return final

    def _return_paused(self, now: float) -> None:
        """Those whose pause is over go first: they have waited longest."""
        over = [task for task in self._again if task.not_before <= now]
        if over:
            self._again = [task for task in self._again if task.not_before > now]
            self._waiting.extendleft(sorted(over, key=lambda task: -task.id))

    def _free(self) -> bool:
        return self._spec.max_concurrency is None or self._num_running < self._spec.max_concurrency

    def _ripe_at(self, now: float) -> float:
        """When those that wait make a call: at once when they fill one, else when the first has waited long enough."""
        if not self._waiting:
            return math.inf
        full = len(self._waiting) >= self._spec.batch_size
        return now if full else self._waiting[0].waits_since + self._spec.batch_wait_s

    def _allowed_at(self, now: float, cost: float) -> float:
        when = now if self._requests is None else self._requests.free_at(now)
        return when if self._tokens is None else max(when, self._tokens.free_at(now, cost))

    def _charge(self, now: float, cost: float) -> None:
        if self._requests is not None:
            self._requests.take(now)
        if self._tokens is not None:
            self._tokens.take(now, cost)

    def _correct(self, batch: Sequence[Task], answers: Sequence[Answer], now: float) -> None:
        """A call that says what it really cost pays the difference when it was more."""
        spent = sum(answer.metrics.get("tokens", 0.0) for answer in answers)
        expected = _cost(batch)
        if self._tokens is not None and spent > expected:
            self._tokens.take(now, spent - expected)


def _cost(batch: Iterable[Task]) -> float:
    return float(sum(task.tokens for task in batch))


WINDOW_S = 60.0


class WindowLimit:
    """At most `limit` units in any `window_s` seconds. Owns the times and amounts of the last window."""

    def __init__(self, limit: float, window_s: float = WINDOW_S) -> None:
        self.limit, self.window_s = limit, window_s
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def free_at(self, now: float, amount: float = 1.0) -> float:
        """The earliest time, not before `now`, at which `amount` may be taken; infinity when it exceeds the limit alone."""
        self._forget(now)
        if amount > self.limit:
            return float("inf")
        excess, when = self._sum + amount - self.limit, now
        for taken_at, taken in self._taken:
            if excess <= 0:
                break
            excess -= taken
            when = taken_at + self.window_s
        return when

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take it, allowed or not: what turned out dearer than expected is paid for afterwards."""
        self._taken.append((now, amount))
        self._sum += amount

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] + self.window_s <= now:
            self._sum -= self._taken.popleft()[1]
        if not self._taken:
            self._sum = 0.0


CALL_S = 0.05


class Peek(NamedTuple):
    """One call: by stream, what there is of completions; and the streams that nobody waits for any more."""

    members: Mapping[int, Mapping[str, Any]]
    forgotten: tuple[int, ...]


class Ahead:
    """See the module docstring. Called by one thread."""

    def __init__(self, most: int) -> None:
        """most: completions in one call."""
        self._most, self._size = most, 1
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._forgotten: list[int] = []
        self._is_running = False

    def offer(self, stream: int, member: Mapping[str, Any]) -> None:
        """There is more of a completion; what was not shown of it before is shown with this."""
        self._waiting[stream] = member

    def ended(self, stream: int) -> None:
        """It is whole, and scored next: no need to show it."""
        self._waiting.pop(stream, None)

    def forget(self, streams: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for stream in streams:
            self._waiting.pop(stream, None)
            self._forgotten.append(stream)

    def due(self) -> Peek | None:
        """What to show now, while no score is asked for; None when there is nothing, or a call runs."""
        if self._is_running or not (self._waiting or self._forgotten):
            return None
        streams = list(islice(self._waiting, self._size))
        peek = Peek({stream: self._waiting.pop(stream) for stream in streams}, tuple(self._forgotten))
        self._forgotten.clear()
        self._is_running = True
        return peek

    def shown(self, seconds: float) -> None:
        """The call has ended."""
        self._is_running = False
        self._size = min(self._most, 2 * self._size) if seconds < CALL_S else max(1, self._size // 2)
