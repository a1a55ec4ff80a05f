"""The queue of one reward: which completions are scored next, when, in which batch, and whether a call is retried. Pure.

    task -> waiting -> (batched) -> concurrency -> requests and tokens per minute -> a call
                ^                                                                      |
                +----------- after a pause, for a transient error with retries left ---+--> an answer

No clock and no thread: time is an argument. A retry waits in this queue, so it holds no worker, obeys the limits, and each
try has its own time-out.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.rewards import Answer, RewardSettings
from async_rlhf.buffers.failures import Failure, FailureKind

WINDOW_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


@dataclass
class ScoringTask:
    """One completion, or one whole group, to be scored by one reward.

    tokens: expected cost. tries: calls already made. stream: id of its prefetches, if there were any.
    """

    id: int
    members: tuple[Mapping[str, Any], ...]
    tokens: int = 0
    tries: int = 0
    stream: int | None = None
    not_before: float = -math.inf
    waits_since: float = 0.0


class RewardQueue:
    """See the module docstring. Single-threaded."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._waiting: deque[ScoringTask] = deque()
        self._paused: list[ScoringTask] = []
        self._num_running = 0
        self._requests = None if settings.requests_per_minute is None else WindowLimit(settings.requests_per_minute)
        self._tokens = None if settings.tokens_per_minute is None else WindowLimit(settings.tokens_per_minute)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self._waiting or self._num_running)

    def offer(self, task: ScoringTask, now: float) -> Answer | None:
        """None, or why the task can never be called: it costs more than a whole minute's tokens."""
        if self._tokens is not None and task.tokens > self._tokens.limit:
            reason = f"needs {task.tokens} tokens, tokens_per_minute allows {self._tokens.limit:.0f}"
            return Answer(None, Failure(FailureKind.REFUSED, reason))
        task.waits_since = now
        self._waiting.append(task)
        return None

    def discard(self, task_ids: set[int]) -> None:
        """Remove tasks that do not run yet."""
        self._waiting = deque(task for task in self._waiting if task.id not in task_ids)
        self._paused = [task for task in self._paused if task.id not in task_ids]

    def due(self, now: float) -> list[tuple[ScoringTask, ...]]:
        """The batches to call now."""
        if self._paused:
            self._return_paused(now)
        calls = []
        while self._waiting and self._has_capacity() and self._ripe_at(now) <= now:
            batch = self._next_batch()
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
        """The earliest time at which `due` may return something without another event; infinity for never."""
        paused = min((task.not_before for task in self._paused), default=math.inf) if self._paused else math.inf
        if not self._waiting or not self._has_capacity():
            return paused
        return min(paused, max(self._ripe_at(now), self._allowed_at(now, _cost(self._next_batch()))))

    def ended(
        self, batch: Sequence[ScoringTask], answers: Sequence[Answer], now: float
    ) -> list[tuple[ScoringTask, Sequence[Answer]]]:
        """The tasks of a finished call with their final answers; the others wait for a retry.

        answers: as many as members in all, or one for all of them.
        """
        self._num_running -= 1
        self._correct(batch, answers, now)
        final: list[tuple[ScoringTask, Sequence[Answer]]] = []
        start = 0
        for task in batch:
            own = answers if len(answers) == 1 else answers[start : start + len(task.members)]
            start += len(task.members)
            failures = (answer.failure for answer in own if answer.failure is not None)
            pauses = [failure.retry_after_s for failure in failures if failure.retry_after_s is not None]
            if pauses and task.tries <= self._settings.retries:
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (task.tries - 1))
                task.not_before = now + max(pause, *pauses)
                self._paused.append(task)
            else:
                final.append((task, own))
        return final

    def _return_paused(self, now: float) -> None:
        """Tasks whose pause is over go first: they have waited longest."""
        over = [task for task in self._paused if task.not_before <= now]
        if over:
            self._paused = [task for task in self._paused if task.not_before > now]
            self._waiting.extendleft(sorted(over, key=lambda task: -task.id))

    def _next_batch(self) -> tuple[ScoringTask, ...]:
        """The first that wait, as many as a minute's tokens allow at once."""
        batch = tuple(itertools.islice(self._waiting, self._settings.batch_size))
        while self._tokens is not None and len(batch) > 1 and _cost(batch) > self._tokens.limit:
            batch = batch[:-1]
        return batch

    def _has_capacity(self) -> bool:
        return self._settings.max_concurrency is None or self._num_running < self._settings.max_concurrency

    def _ripe_at(self, now: float) -> float:
        """When the waiting tasks make a call: at once for a full batch, else `batch_wait_s` after the first came."""
        if not self._waiting:
            return math.inf
        full = len(self._waiting) >= self._settings.batch_size
        return now if full else self._waiting[0].waits_since + self._settings.batch_wait_s

    def _allowed_at(self, now: float, cost: float) -> float:
        when = now if self._requests is None else self._requests.free_at(now)
        return when if self._tokens is None else max(when, self._tokens.free_at(now, cost))

    def _charge(self, now: float, cost: float) -> None:
        if self._requests is not None:
            self._requests.take(now)
        if self._tokens is not None:
            self._tokens.take(now, cost)

    def _correct(self, batch: Sequence[ScoringTask], answers: Sequence[Answer], now: float) -> None:
        """Charges what a call reports (metric `tokens`) beyond its expected cost."""
        spent = sum(answer.metrics.get("tokens", 0.0) for answer in answers)
        expected = _cost(batch)
        if self._tokens is not None and spent > expected:
            self._tokens.take(now, spent - expected)


class WindowLimit:
    """At most `limit` units in any `window_s` seconds, exact in every window.

    A leaky bucket, as in most rate limiters, lets through almost twice its limit in some windows; a provider that counts any
    60 seconds then answers 429. One remembered entry a call is exact.
    """

    def __init__(self, limit: float, window_s: float = WINDOW_S) -> None:
        self.limit, self.window_s = limit, window_s
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def free_at(self, now: float, amount: float = 1.0) -> float:
        """The earliest time, not before `now`, at which `amount` may be taken; infinity when it exceeds the limit alone."""
        self._expire(now)
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
        """Unconditional: a call that cost more than expected is charged afterwards."""
        self._taken.append((now, amount))
        self._sum += amount

    def _expire(self, now: float) -> None:
        while self._taken and self._taken[0][0] + self.window_s <= now:
            self._sum -= self._taken.popleft()[1]
        if not self._taken:
            self._sum = 0.0


def _cost(batch: Iterable[ScoringTask]) -> float:
    return float(sum(task.tokens for task in batch))
