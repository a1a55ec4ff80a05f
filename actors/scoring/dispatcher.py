"""Takes tasks from the queues of all rewards to where they run (`Sessions`) and brings the answers back.

owns        a queue for each reward, the places where they run, a thread that waits for the time when a queue may go on
waits for   nothing in its methods, which any thread may call; one at a time advances the queues
woken by    `submit` and the other methods, and by the threads of the places with answers
on close    the places are closed; tasks without an answer get none
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardFunction, RewardSpec
from async_rlhf.actors.scoring.remote import RemoteRewards, Shown
from async_rlhf.actors.scoring.reward_queue import Prefetch, PrefetchBatch, RewardQueue, ScoringTask
from async_rlhf.actors.scoring.reward_worker import Answers, RewardCall, RewardKind, answers_of
from async_rlhf.actors.workers.book import Failed
from async_rlhf.actors.workers.pool import WorkerPool
from async_rlhf.actors.workers.sessions import Closed, Sessions, StepResult
from async_rlhf.buffers.errors import RewardError

# Batches, limits and retries of a stage of the scorer are the scorer's.
_UNLIMITED: Mapping[str, Any] = {
    "batch_size": 1,
    "batch_wait_s": 0.0,
    "max_concurrency": None,
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "retries": 0,
}
# Of plain functions of the calling process at once: they share an interpreter, and gain where they wait for something.
_CALLER_THREADS = 16
Place = tuple[str, ...]
"""Where a reward runs: ("scorer",), ("server", ADDRESS, KEYS), ("event loop",), ("workers", its reward if it has its own); of
what only this process has with a last "caller"."""
_SCORER: Place = ("scorer",)


class Dispatcher:
    """See the module docstring.

    answered: called once for each task, with its members' answers. shown: called for each prefetch with the reward's name, the
    streams it has read, and when that ran or why it failed. Both while it is locked, from whichever thread.
    scorer: address of the scoring server of this machine, which runs the stages placed there; "" runs every stage here.
    functions: by reward, those that only this process has.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        answered: Callable[[int, Answers], None],
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
            is_there = self._places[spec.name] == _SCORER
            self._queues[spec.name] = RewardQueue(replace(spec, **_UNLIMITED) if is_there else spec)
            if spec.stream_tokens and not is_there:
                self._prefetches[spec.name] = Prefetch(spec.batch_size)
        self._running: dict[int, tuple[RewardCall, tuple[ScoringTask, ...] | PrefetchBatch]] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._due, self._closing = float("inf"), False
        self._sessions: dict[Place, Sessions] = {}
        for place in dict.fromkeys(self._places.values()):
            self._sessions[place] = self._made(place, tuple(s for s in specs if self._places[s.name] == place))
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    @property
    def num_resent(self) -> int:
        """Requests that were sent to a server again."""
        return sum(each.num_resent for each in self._sessions.values() if isinstance(each, RemoteRewards))

    def submit(self, name: str, task: ScoringTask) -> None:
        with self._lock:
            if (refused := self._queues[name].offer(task, time.monotonic())) is not None:
                self._answered(task.id, (refused,))
            if task.stream is not None and name in self._prefetches:
                self._prefetches[name].ended(task.stream)
            calls = self._advance(name)
        self._hand_over(calls)

    def show(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        """An unfinished completion has grown. members: by reward, what it can use of it."""
        with self._changed:
            for name, member in members.items():
                if name in self._prefetches:
                    self._prefetches[name].offer(stream, member)
                    self._hand_over(self._advance(name))
                else:
                    self._hand_over([(next(self._ids), self._call(name, (member,), prefetch=True, stream=stream))])

    def forget(self, streams: Sequence[int]) -> None:
        """These completions will not be scored, or their scores are no longer needed."""
        with self._changed:
            for name, prefetch in self._prefetches.items():
                prefetch.forget(streams)
                self._hand_over(self._advance(name))
            there = [name for name, place in self._places.items() if place == _SCORER and self._specs[name].stream_tokens]
            if there:  # Streams are one set for all stages of the scorer.
                self._hand_over([(next(self._ids), self._call(there[0], (), prefetch=True, forgotten=tuple(streams)))])

    def discard(self, task_ids: Iterable[int]) -> None:
        """The answers of these tasks are no longer needed: what has not begun does not begin, and an asynchronous call that
        runs is cancelled."""
        with self._changed:
            unwanted = set(task_ids)
            for waiting in self._queues.values():
                waiting.discard(unwanted)
            unneeded: dict[Place, set[int]] = {}
            for id, (call, batch) in self._running.items():
                if not isinstance(batch, PrefetchBatch) and all(task.id in unwanted for task in batch):
                    unneeded.setdefault(self._places[call.name], set()).add(id)
            for place, ids in unneeded.items():
                self._sessions[place].discard(ids, ids)

    def check(self) -> None:
        """Raises RewardError when a place cannot recover."""
        for each in self._sessions.values():
            each.check()
        if not self._thread.is_alive():
            raise RewardError("the thread that hands out scoring has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if a process is left after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        with contextlib.ExitStack() as closing:  # One that fails to close does not keep the others open.
            for each in self._sessions.values():
                closing.callback(_close, each, end_s)

    # -- locked ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                if self._due <= now:
                    self._due = float("inf")
                    for name in self._queues:
                        self._hand_over(self._advance(name))
                self._changed.wait(None if self._due == float("inf") else max(0.0, self._due - now))

    def _advance(self, name: str) -> list[tuple[int, RewardCall]]:
        """What may be called of a reward now; lets the thread come back when more may be."""
        calls: list[tuple[int, RewardCall]] = []
        if self._closing:
            return calls
        waiting, now = self._queues[name], time.monotonic()
        for batch in waiting.due(now):
            members = tuple(member for task in batch for member in task.members)
            tokens, stream = sum(task.tokens for task in batch), batch[0].stream if len(batch) == 1 else None
            calls.append(self._begun(self._call(name, members, stream=stream, tokens=tokens), batch))
        prefetch = self._prefetches.get(name)
        if prefetch is not None and waiting.is_idle and (ahead := prefetch.due()) is not None:
            members = tuple(ahead.members.values())
            calls.append(self._begun(self._call(name, members, prefetch=True, forgotten=ahead.forgotten), ahead))
        if (due := waiting.next_due(now)) < self._due:
            self._due = due
            self._changed.notify()
        return calls

    def _call(self, name: str, members: tuple[Mapping[str, Any], ...], **details: Any) -> RewardCall:
        return RewardCall(name, members, self._specs[name].timeout_s or self._config.timeout_s, **details)

    def _begun(self, call: RewardCall, batch: tuple[ScoringTask, ...] | PrefetchBatch) -> tuple[int, RewardCall]:
        id = next(self._ids)
        self._running[id] = call, batch
        return id, call

    def _hand_over(self, calls: Iterable[tuple[int, RewardCall]]) -> None:
        """Need not be locked: a thread that packs calls keeps no other waiting."""
        for id, call in calls:
            self._sessions[self._places[call.name]].begin(id, id, tuple(call), call.timeout_s)

    def _happened(self, id: int, came: StepResult | Closed | Failed | None) -> None:
        """Called from the threads of the places."""
        with self._lock:
            if id not in self._running:  # a second answer: the place gave the call up just as it ended
                if id < 0:
                    self._answered(-1, ())  # a place has ended: `check` has its reason
                return
            call, batch = self._running[id]
            calls = [(id, call)]  # made again, where its process ended for another's reason
            if came is not None:
                del self._running[id]
                self._ended(call, batch, answers_of(came, call))
                calls = self._advance(call.name)
        self._hand_over(calls)

    def _ended(self, call: RewardCall, batch: tuple[ScoringTask, ...] | PrefetchBatch, answers: Answers) -> None:
        if isinstance(batch, PrefetchBatch):
            self._prefetches[call.name].shown(answers[0].seconds)
            self._shown(call.name, tuple(batch.members), answers[0])
            return
        for task, own in self._queues[call.name].ended(batch, answers, time.monotonic()):
            self._answered(task.id, tuple(own))

    # -- where a reward runs -----------------------------------------------------------------------------------------

    def _place(self, spec: RewardSpec) -> Place:
        if self._scorer and self._config.in_process(spec.name):
            return _SCORER
        if spec.target == "remote":
            return "server", str(spec.options["address"]), str(spec.options.get("keys", ""))
        own = ("caller",) if spec.name in self._functions else ()
        return ("event loop", *own) if spec.kind == "async" else ("workers", spec.name if spec.workers else "", *own)

    def _made(self, place: Place, specs: tuple[RewardSpec, ...]) -> Sessions:
        if place == _SCORER:
            names = {spec.name: spec.name for spec in specs}
            return RemoteRewards(self._scorer, "", names, self._happened, self._shown, is_scorer=True)
        if place[0] == "server":
            names = {spec.name: str(spec.options.get("reward_name", "")) for spec in specs}
            return RemoteRewards(place[1], place[2], names, self._happened, self._shown, is_scorer=False)
        memory_mb = None if any(spec.holds_model for spec in specs) else self._config.worker_memory_mb
        functions = self._functions if specs[0].name in self._functions else None
        kind = RewardKind(specs, self._config.max_concurrency, memory_mb, functions)
        workers = specs[0].workers or (self._config.workers if functions is None else _CALLER_THREADS)
        what = f"the worker processes of {', '.join(f'{spec.name} ({spec.target})' for spec in specs)}"
        return WorkerPool(kind, 1 if specs[0].kind == "async" else workers, what, RewardError, self._happened)


def _close(sessions: Sessions, end_s: float) -> None:
    sessions.close(max(0.0, end_s - time.monotonic()))
