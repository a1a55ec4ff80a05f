"""The calls of the rewards of one place: tasks go through the queues of its rewards to where they run, answers come back.

owns        a queue for each reward, and the sessions that run their calls
waits for   nothing: all but what hands over happens in the thread of the sessions, which comes back when a queue may go on
on close    the sessions are closed; tasks without an answer get none
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from async_rlhf.actors.rewards import Answer, RewardSettings, RewardSpec
from async_rlhf.actors.scoring.prefetch import Prefetch, PrefetchBatch
from async_rlhf.actors.scoring.reward_queue import RewardQueue, ScoringTask
from async_rlhf.actors.scoring.reward_worker import Answers, RewardCall, answers_of
from async_rlhf.actors.workers.sessions import Closed, Happened, Lost, Sessions, StepResult, Stopped

_UNLIMITED = RewardSettings(batch_wait_s=0.0)
Shown = Callable[[str, Collection[int], Answer], object]
"""Takes a finished prefetch: reward, streams, and when it ran or why it failed."""


class RewardCalls:
    """See the module docstring."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        timeout_s: float,
        run: Callable[[Happened], Sessions],
        answered: Callable[[int, Answers], object],
        shown: Shown,
        stopped: Callable[[], object],
        is_scorer: bool = False,
    ) -> None:
        """timeout_s: of a call whose reward has none of its own. run: begins the sessions. answered: called once for each task,
        with its members' answers. shown: called for each prefetch. stopped: called when nothing more is answered. All three
        from the thread of the sessions. is_scorer: batches, limits, retries and what is read ahead are those of the scorer."""
        self._answered, self._shown, self._stopped = answered, shown, stopped
        self._timeouts = {spec.name: spec.timeout_s or timeout_s for spec in specs}
        self._queues = {spec.name: RewardQueue(_UNLIMITED if is_scorer else spec) for spec in specs}
        streamed = [spec for spec in specs if spec.stream_tokens]
        self._streamed = tuple(spec.name for spec in streamed)
        self._prefetches = {spec.name: Prefetch(spec.batch_size) for spec in streamed if not is_scorer}
        self._running: dict[int, tuple[RewardCall, tuple[ScoringTask, ...] | PrefetchBatch]] = {}
        self._ids, self._due = itertools.count(), math.inf
        self.sessions = run(self._happened)

    def submit(self, name: str, task: ScoringTask) -> None:
        self.sessions.do(partial(self._submit, name, task))

    def show(self, name: str, stream: int, member: Mapping[str, Any]) -> None:
        """An unfinished completion has grown. member: what the reward can use of it."""
        self.sessions.do(partial(self._show, name, stream, member))

    def forget(self, streams: Collection[int]) -> None:
        """These completions will not be scored, or their scores are no longer needed."""
        if self._streamed:
            self.sessions.do(partial(self._forget, tuple(streams)))

    def discard(self, task_ids: Collection[int]) -> None:
        """The answers of these tasks are no longer needed: what has not begun does not begin, and an asynchronous call that
        runs is cancelled."""
        self.sessions.do(partial(self._discard, set(task_ids)))

    # -- the thread of the sessions ----------------------------------------------------------------------------------

    def _submit(self, name: str, task: ScoringTask) -> None:
        if (refused := self._queues[name].offer(task, time.monotonic())) is not None:
            self._answered(task.id, (refused,))
        if task.stream is not None and name in self._prefetches:
            self._prefetches[name].ended(task.stream)
        self._advance(name)

    def _show(self, name: str, stream: int, member: Mapping[str, Any]) -> None:
        if name in self._prefetches:
            self._prefetches[name].offer(stream, member)
            self._advance(name)
        else:
            self._begin(next(self._ids), self._call(name, (member,), prefetch=True, stream=stream))

    def _forget(self, streams: tuple[int, ...]) -> None:
        for name, prefetch in self._prefetches.items():
            prefetch.forget(streams)
            self._advance(name)
        if not self._prefetches:  # there streams are one set for all rewards
            self._begin(next(self._ids), self._call(self._streamed[0], (), prefetch=True, forgotten=streams))

    def _discard(self, unwanted: set[int]) -> None:
        for queue in self._queues.values():
            queue.discard(unwanted)
        ids = {
            id
            for id, (_, batch) in self._running.items()
            if not isinstance(batch, PrefetchBatch) and all(task.id in unwanted for task in batch)
        }
        if ids:
            self.sessions.discard(ids, ids)

    def _advance(self, name: str) -> None:
        """Begin what may be called of a reward now; come back when more may be."""
        queue, now = self._queues[name], time.monotonic()
        for batch in queue.due(now):
            members = tuple(member for task in batch for member in task.members)
            tokens, stream = sum(task.tokens for task in batch), batch[0].stream if len(batch) == 1 else None
            self._run(self._call(name, members, stream=stream, tokens=tokens), batch)
        prefetch = self._prefetches.get(name)
        if prefetch is not None and queue.is_idle and (ahead := prefetch.due()) is not None:
            members = tuple(ahead.members.values())
            self._run(self._call(name, members, prefetch=True, forgotten=ahead.forgotten), ahead)
        if (due := queue.next_due(now)) < self._due:
            self._due = due
            self.sessions.at(due, self._advance_all)

    def _advance_all(self) -> None:
        self._due = math.inf
        for name in self._queues:
            self._advance(name)

    def _call(self, name: str, members: tuple[Mapping[str, Any], ...], **details: Any) -> RewardCall:
        return RewardCall(name, members, self._timeouts[name], **details)

    def _run(self, call: RewardCall, batch: tuple[ScoringTask, ...] | PrefetchBatch) -> None:
        id = next(self._ids)
        self._running[id] = call, batch
        self._begin(id, call)

    def _begin(self, id: int, call: RewardCall) -> None:
        self.sessions.begin(id, id, tuple(call), call.timeout_s)

    def _happened(self, came: StepResult | Closed | Lost | Stopped) -> None:
        if isinstance(came, Stopped):
            self._stopped()
        elif isinstance(came, Lost):
            self._begin(came.id, self._running[came.id][0])  # its process ended for another's reason
        elif came.id in self._running:  # a second answer comes when a call ends just as it is given up
            call, batch = self._running.pop(came.id)
            self._ended(call, batch, answers_of(came))
            self._advance(call.name)

    def _ended(self, call: RewardCall, batch: tuple[ScoringTask, ...] | PrefetchBatch, answers: Answers) -> None:
        if isinstance(batch, PrefetchBatch):
            self._prefetches[call.name].shown(answers[0].seconds)
            self._shown(call.name, batch.members.keys(), answers[0])
            return
        for task, own in self._queues[call.name].ended(batch, answers, time.monotonic()):
            self._answered(task.id, tuple(own))
