"""The scoring pool: judges each completion the moment it ends, while its group is still being generated.

Used by the actor's loop, which must never block: `submit` and `poll` return at once, and `wake` is called from another
thread when a poll may have something. Never here: running user code (`sync_calls`, `async_calls` do, in other processes).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from actors.config import RewardsConfig
from actors.rewards import Answer, RewardSpec
from actors.scoring.async_calls import AsyncCalls
from actors.scoring.calls import Call
from actors.scoring.sync_calls import SyncCalls
from buffers.errors import RewardError
from buffers.record import Score

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Scored(Generic[Key]):
    """A completion that every reward has answered for. seconds: from `submit` to the last answer."""

    key: Key
    scores: Mapping[str, Score]
    seconds: float


@dataclass
class RewardCounters:
    """What one reward has done so far. seconds: time its calls ran, summed over concurrent calls."""

    scored: int = 0
    not_applicable: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class _Pending(Generic[Key]):
    key: Key
    num_unanswered: int
    submitted_s: float
    scores: dict[str, Score] = field(default_factory=dict)


class ScoringPool(Generic[Key]):
    """Scores completions with every reward of a run.

    Owns: worker processes for synchronous rewards, one process for asynchronous ones, and the threads that talk to
    them. Waits for nothing. Woken by `submit` and `poll`, both called from one thread. On close: kills the processes.
    `counters` has one entry per reward.
    """

    def __init__(self, specs: Sequence[RewardSpec], config: RewardsConfig, wake: Callable[[], None] = lambda: None) -> None:
        if not specs:
            raise RewardError("a scoring pool needs a reward, got none; name one in rewards.functions")
        self._specs = tuple(specs)
        self._wake = wake
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._call_ids = itertools.count()
        self._calls: dict[int, tuple[_Pending[Key], str]] = {}
        self._pending: dict[Key, _Pending[Key]] = {}
        self.counters = {spec.name: RewardCounters() for spec in self._specs}
        self._runners: dict[str, SyncCalls | AsyncCalls] = {}
        if specs := tuple(spec for spec in self._specs if spec.kind == "sync"):
            self._runners["sync"] = SyncCalls(specs, config.timeout_s, config.workers, self._answered)
        if specs := tuple(spec for spec in self._specs if spec.kind == "async"):
            self._runners["async"] = AsyncCalls(specs, config.timeout_s, config.max_concurrency, self._answered)

    @property
    def num_pending(self) -> int:
        """Completions submitted and neither returned by `poll` nor discarded."""
        return len(self._pending)

    def submit(self, key: Key, fields: Mapping[str, Any]) -> None:
        """Score one completion.

        fields: `completion` and `prompt` (text), `completion_ids` and `prompt_ids` (lists of int), `finish_reason`, and
        every column of the prompt's row; plain data. Raises RewardError for a key that is being scored already.
        """
        if key in self._pending:
            raise RewardError(f"{key} is being scored already; poll or discard it first")
        pending = self._pending[key] = _Pending(key, len(self._specs), time.monotonic())
        for spec in self._specs:
            call_id = next(self._call_ids)
            self._calls[call_id] = (pending, spec.name)
            usable = fields if spec.fields is None else {name: fields[name] for name in spec.fields if name in fields}
            self._runners[spec.kind].submit(Call(call_id, spec, dict(usable)))

    def poll(self) -> list[Scored[Key]]:
        """The completions whose every reward has answered since the last poll. Never waits.

        Raises RewardError when the processes of a reward end again and again before they can answer anything.
        """
        for runner in self._runners.values():
            runner.check()
        scored = []
        # No more than what is there now: rewards that answer faster than this loop must not hold the actor up.
        for _ in range(self._answers.qsize()):
            call_id, answer = self._answers.get_nowait()
            if (done := self._settle(call_id, answer)) is not None:
                scored.append(done)
        return scored

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget these completions; their calls run on, unseen. Unknown keys are ignored."""
        for key in keys:
            self._pending.pop(key, None)

    def close(self, deadline_s: float = 5.0) -> None:
        """Kill all processes; what is pending is never scored. Raises DeadlineError if one is left after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        with contextlib.ExitStack() as closing:  # One that fails to close does not keep the other open.
            for runner in self._runners.values():
                closing.callback(_close, runner, end_s)
        self._runners.clear()

    def _answered(self, call_id: int, answer: Answer) -> None:
        """Called from the runners' threads."""
        self._answers.put((call_id, answer))
        self._wake()

    def _settle(self, call_id: int, answer: Answer) -> Scored[Key] | None:
        entry = self._calls.pop(call_id, None)
        if entry is None:
            return None  # A second answer: the call was given up just as it ended.
        pending, name = entry
        self._count(name, answer)
        pending.scores[name] = Score(value=answer.value, failure=answer.failure)
        pending.num_unanswered -= 1
        if pending.num_unanswered or self._pending.get(pending.key) is not pending:
            return None
        del self._pending[pending.key]
        return Scored(pending.key, pending.scores, time.monotonic() - pending.submitted_s)

    def _count(self, name: str, answer: Answer) -> None:
        counters = self.counters[name]
        counters.seconds += answer.seconds
        if answer.failure is not None:
            if counters.failed == 0:
                logger.warning(
                    "reward %r failed, later failures are only counted: %s\n%s", name, answer.failure, answer.traceback
                )
            counters.failed += 1
        elif answer.value is None:
            counters.not_applicable += 1
        else:
            counters.scored += 1


def _close(runner: SyncCalls | AsyncCalls, end_s: float) -> None:
    runner.close(max(0.0, end_s - time.monotonic()))
