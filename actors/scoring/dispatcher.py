"""Takes tasks from the queues of all rewards to their executors and brings the answers back. One thread.

owns        a queue for each reward, the executors
waits for   tasks, answers, the next time a queue may go on; checks the executors twice a second while calls run
woken by    `submit` and the other methods, and by the executors' threads
on close    the executors are closed; tasks without an answer get none
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardFunction, RewardSpec
from async_rlhf.actors.scoring.executor import Answered, Answers, Call, Executor, Shown
from async_rlhf.actors.scoring.remote_executor import RemoteExecutor
from async_rlhf.actors.scoring.reward_queue import Prefetch, PrefetchBatch, RewardQueue, Task
from async_rlhf.actors.scoring.reward_workers import RewardWorkers
from async_rlhf.actors.scoring.thread_executor import ThreadExecutor
from async_rlhf.buffers.errors import RewardError

_LOOK_S = 0.5
_REMOTE, _CALLER = "remote", "caller"
# Batches, limits and retries of a remote stage are its server's.
_UNLIMITED: Mapping[str, Any] = {
    "batch_size": 1,
    "batch_wait_s": 0.0,
    "max_concurrency": None,
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "retries": 0,
}


class Dispatcher:
    """See the module docstring.

    answered: called once for each task, with its members' answers. shown: called for each prefetch with the reward's name, the
    streams it has read, and when that ran or why it failed. Both from its threads.
    scorer: address of the scoring server of this machine, which runs the stages placed there; "" runs every stage here.
    functions: by reward, those that only this process has.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        answered: Answered,
        shown: Shown,
        scorer: str = "",
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self._config, self._scorer, self._answered, self._shown = config, scorer, answered, shown
        self._functions = functions or {}
        self._specs = {spec.name: spec for spec in specs}
        self._places = {spec.name: self._place(spec) for spec in specs}
        self._queues: dict[str, RewardQueue] = {}
        self._prefetches: dict[str, Prefetch] = {}
        for spec in specs:
            is_remote = self._places[spec.name] == _REMOTE
            self._queues[spec.name] = RewardQueue(replace(spec, **_UNLIMITED) if is_remote else spec)
            if spec.stream_tokens and not is_remote:
                self._prefetches[spec.name] = Prefetch(spec.batch_size)
        self._running: dict[int, tuple[str, tuple[Task, ...]]] = {}
        self._prefetching: dict[int, tuple[str, PrefetchBatch]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._call_ids = itertools.count()
        self._executors: dict[str, Executor] = {}
        for place in dict.fromkeys(self._places.values()):
            self._executors[place] = self._executor(place, tuple(s for s in specs if self._places[s.name] == place))
        self._closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    @property
    def num_resent(self) -> int:
        """Requests that were sent to the scoring server again."""
        remote = self._executors.get(_REMOTE)
        return remote.num_resent if isinstance(remote, RemoteExecutor) else 0

    def submit(self, name: str, task: Task) -> None:
        self._inbox.put(partial(self._offer, name, task))

    def show(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        """An unfinished completion has grown. members: by reward, what it can use of it."""
        self._inbox.put(partial(self._offer_prefetch, stream, members))

    def forget(self, streams: Sequence[int]) -> None:
        """These completions will not be scored, or their scores are no longer needed."""
        self._inbox.put(partial(self._forget, tuple(streams)))

    def discard(self, task_ids: Iterable[int]) -> None:
        """The answers of these tasks are no longer needed: what has not begun does not begin."""
        self._inbox.put(partial(self._discard, set(task_ids)))

    def check(self) -> None:
        """Raises RewardError when an executor cannot recover."""
        if self._broken is not None or not self._thread.is_alive():
            raise RewardError(self._broken or "the thread that hands out scoring has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if a process is left after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(deadline_s)
        with contextlib.ExitStack() as closing:  # One that fails to close does not keep the others open.
            for executor in self._executors.values():
                closing.callback(_close, executor, end_s)
        self._executors.clear()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = 0.0
        while not self._closing:
            self._receive(self._patience_s(looked))
            now = time.monotonic()
            if now - looked >= _LOOK_S:
                looked = now
                try:
                    for executor in self._executors.values():
                        executor.check()
                except RewardError as error:
                    self._broken = str(error)
                    self._answered(-1, ())  # Wakes the owner, whose `check` raises.
                    return
            for name, waiting in self._queues.items():
                for task, answer in waiting.impossible():
                    self._answered(task.id, (answer,))
                for batch in waiting.due(now):
                    self._call(name, batch)
            for name, prefetch in self._prefetches.items():
                if self._queues[name].is_idle and (batch_ahead := prefetch.due()) is not None:
                    self._call_prefetch(name, batch_ahead)

    def _patience_s(self, looked: float) -> float | None:
        now = time.monotonic()
        due = min((waiting.next_due(now) for waiting in self._queues.values()), default=float("inf"))
        if self._running or self._prefetching:
            due = min(due, looked + _LOOK_S)
        return None if due == float("inf") else max(0.0, due - now)

    def _receive(self, patience_s: float | None) -> None:
        """Wait for one event, then take every other that is there."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=patience_s)()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()

    def _offer(self, name: str, task: Task) -> None:
        self._queues[name].offer(task, time.monotonic())
        if task.stream is not None and name in self._prefetches:
            self._prefetches[name].ended(task.stream)

    def _offer_prefetch(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        for name, member in members.items():
            if name in self._prefetches:
                self._prefetches[name].offer(stream, member)
            else:
                self._submit(name, (member,), prefetch=True, stream=stream)

    def _forget(self, streams: tuple[int, ...]) -> None:
        for prefetch in self._prefetches.values():
            prefetch.forget(streams)
        remote = [name for name, place in self._places.items() if place == _REMOTE and self._specs[name].stream_tokens]
        if remote:  # Streams are one set for all stages of the server.
            self._submit(remote[0], (), prefetch=True, forgotten=streams)

    def _discard(self, task_ids: set[int]) -> None:
        for waiting in self._queues.values():
            waiting.discard(task_ids)
        unneeded: dict[str, set[int]] = {}
        for call_id, (name, batch) in self._running.items():
            if all(task.id in task_ids for task in batch):
                unneeded.setdefault(self._places[name], set()).add(call_id)
        for place, call_ids in unneeded.items():
            self._executors[place].discard(call_ids)

    def _call(self, name: str, batch: tuple[Task, ...]) -> None:
        members = tuple(member for task in batch for member in task.members)
        tokens = sum(task.tokens for task in batch)
        call_id = self._submit(name, members, stream=batch[0].stream if len(batch) == 1 else None, tokens=tokens)
        self._running[call_id] = (name, batch)

    def _call_prefetch(self, name: str, batch: PrefetchBatch) -> None:
        call_id = self._submit(name, tuple(batch.members.values()), prefetch=True, forgotten=batch.forgotten)
        self._prefetching[call_id] = (name, batch)

    def _submit(self, name: str, members: tuple[Mapping[str, Any], ...], **details: Any) -> int:
        call_id = next(self._call_ids)
        call = Call(call_id, name, members, self._timeout_s(self._specs[name]), **details)
        self._executors[self._places[name]].submit(call)
        return call_id

    def _on_answers(self, call_id: int, answers: Answers) -> None:
        """Called from the executors' threads."""
        self._inbox.put(partial(self._ended, call_id, answers))

    def _ended(self, call_id: int, answers: Answers) -> None:
        if (prefetched := self._prefetching.pop(call_id, None)) is not None:
            (answer, *_), (name, prefetch) = answers, prefetched
            self._prefetches[name].shown(answer.seconds)
            self._shown(name, tuple(prefetch.members), answer)
        elif call_id in self._running:  # Else a second answer: the executor gave the call up just as it ended.
            name, batch = self._running.pop(call_id)
            for task, own in self._queues[name].ended(batch, answers, time.monotonic()):
                self._answered(task.id, tuple(own))

    # -- where a reward runs -----------------------------------------------------------------------------------------

    def _place(self, spec: RewardSpec) -> str:
        """On the scoring server, in threads here, on the event loop, in the shared workers, or in workers of its own."""
        if self._scorer and self._config.in_process(spec.name):
            return _REMOTE
        if spec.name in self._functions:
            return _CALLER
        return "event loop" if spec.kind == "async" else f"workers {spec.name if spec.workers else ''}"

    def _executor(self, place: str, specs: tuple[RewardSpec, ...]) -> Executor:
        if place == _REMOTE:
            return RemoteExecutor(self._scorer, self._on_answers, self._shown)
        if place == _CALLER:
            return ThreadExecutor(self._functions, self._config.max_concurrency, self._on_answers)
        memory_mb = None if any(spec.holds_model for spec in specs) else self._config.worker_memory_mb
        if specs[0].kind == "async":
            return RewardWorkers(specs, 1, self._config.max_concurrency, memory_mb, self._on_answers)
        return RewardWorkers(specs, specs[0].workers or self._config.workers, 1, memory_mb, self._on_answers)

    def _timeout_s(self, spec: RewardSpec) -> float:
        return spec.timeout_s or self._config.timeout_s


def _close(executor: Executor, end_s: float) -> None:
    executor.close(max(0.0, end_s - time.monotonic()))
