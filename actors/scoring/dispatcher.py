"""Hands every task to its reward when its lane allows, and brings the answers back. One thread.

owns        a lane for each reward, the processes that run them
waits for   tasks, answers, the next time a lane may go on; looks after the processes twice a second while calls run
woken by    `submit`, and by the threads of the processes' pools
on close    the processes are killed; tasks without an answer get none
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardSpec
from async_rlhf.actors.scoring.event_loop_executor import AsyncCalls
from async_rlhf.actors.scoring.executor import Answered, Answers, Call, Shown
from async_rlhf.actors.scoring.process_executor import SyncCalls
from async_rlhf.actors.scoring.reward_queue import Ahead, Lane, Peek, Task
from async_rlhf.buffers.errors import RewardError

logger = logging.getLogger(__name__)
_LOOK_S = 0.5


class Dispatcher:
    """See the module docstring. Both are called by its thread.

    answered: once for each task, with its members' answers. shown: once for each call that let a reward read along, with the
    reward's name, the streams it was shown, and when that ran or why it failed.
    """

    def __init__(self, specs: Sequence[RewardSpec], config: ScoringConfig, answered: Answered, shown: Shown) -> None:
        self._config, self._answered, self._shown = config, answered, shown
        self._specs = {spec.name: spec for spec in specs}
        self._lanes = {spec.name: Lane(spec) for spec in specs}
        self._ahead = {spec.name: Ahead(spec.batch_size) for spec in specs if spec.stream_tokens}
        self._peeks: dict[int, tuple[str, Peek]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._call_ids = itertools.count()
        self._running: dict[int, tuple[str, tuple[Task, ...]]] = {}
        self._runners: dict[str, SyncCalls | AsyncCalls] = {}
        for room, sharing in _rooms(specs).items():
            self._runners[room] = self._runner(sharing)
        self._closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    def submit(self, name: str, task: Task) -> None:
        self._inbox.put(partial(self._offer, name, task))

    def show(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        """There is more of a completion that is still being written; members: what each reward can use of it, by name."""
        self._inbox.put(partial(self._offer_ahead, stream, members))

    def forget(self, streams: Sequence[int]) -> None:
        """These are written no further, or their scores are not wanted any more."""
        self._inbox.put(partial(self._forget_ahead, streams))

    def discard(self, task_ids: Iterable[int]) -> None:
        """Tasks that were not begun are not begun any more."""
        self._inbox.put(partial(self._forget, set(task_ids)))

    def check(self) -> None:
        """Raises RewardError when the processes of a reward end again and again before they can answer anything."""
        if self._broken is not None or not self._thread.is_alive():
            raise RewardError(self._broken or "the thread that hands out scoring has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if a process is left after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(deadline_s)
        with contextlib.ExitStack() as closing:  # One that fails to close does not keep the other open.
            for runner in self._runners.values():
                closing.callback(_close, runner, end_s)
        self._runners.clear()

    def _run(self) -> None:
        looked = 0.0
        while not self._closing:
            self._hear(self._patience_s(looked))
            now = time.monotonic()
            if now - looked >= _LOOK_S:
                looked = now
                try:
                    for runner in self._runners.values():
                        runner.check()
                except RewardError as error:
                    self._broken = str(error)
                    self._answered(-1, ())  # wakes whoever waits, and says nothing else
                    return
            for name, lane in self._lanes.items():
                for task, answer in lane.impossible():
                    self._answered(task.id, (answer,))
                for batch in lane.due(now):
                    self._call(name, batch)
            for name, ahead in self._ahead.items():
                if self._lanes[name].is_idle and (peek := ahead.due()) is not None:
                    self._peek(name, peek)

    def _patience_s(self, looked: float) -> float | None:
        now = time.monotonic()
        due = min(lane.next_due(now) for lane in self._lanes.values())
        if self._running or self._peeks:
            due = min(due, looked + _LOOK_S)
        return None if due == float("inf") else max(0.0, due - now)

    def _hear(self, patience_s: float | None) -> None:
        """Wait for one event, then take in what else is there."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=patience_s)()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()

    def _offer(self, name: str, task: Task) -> None:
        self._lanes[name].offer(task, time.monotonic())
        if task.stream is not None and name in self._ahead:
            self._ahead[name].ended(task.stream)

    def _offer_ahead(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        for name, member in members.items():
            self._ahead[name].offer(stream, member)

    def _forget_ahead(self, streams: Sequence[int]) -> None:
        for ahead in self._ahead.values():
            ahead.forget(streams)

    def _forget(self, task_ids: set[int]) -> None:
        for lane in self._lanes.values():
            lane.discard(task_ids)

    def _ended(self, call_id: int, answers: Answers) -> None:
        if (peeked := self._peeks.pop(call_id, None)) is not None:
            (answer, *_), (name, peek) = answers, peeked
            self._ahead[name].shown(answer.seconds)
            self._shown(name, tuple(peek.members), answer)
            return
        if call_id not in self._running:
            return  # A second answer: the call was given up just as it ended.
        name, batch = self._running.pop(call_id)
        for task, own in self._lanes[name].ended(batch, answers, time.monotonic()):
            self._answered(task.id, tuple(own))

    def _call(self, name: str, batch: tuple[Task, ...]) -> None:
        spec, call_id = self._specs[name], next(self._call_ids)
        self._running[call_id] = (name, batch)
        members = tuple(member for task in batch for member in task.members)
        self._runners[_room(spec)].submit(Call(call_id, spec, members, self._timeout_s(spec)))

    def _peek(self, name: str, peek: Peek) -> None:
        spec, call_id = self._specs[name], next(self._call_ids)
        self._peeks[call_id] = (name, peek)
        members = tuple(peek.members.values())
        call = Call(call_id, spec, members, self._timeout_s(spec), prefetch=True, forgotten=peek.forgotten)
        self._runners[_room(spec)].submit(call)

    def _runner(self, specs: tuple[RewardSpec, ...]) -> SyncCalls | AsyncCalls:
        memory_mb = None if any(spec.holds_model for spec in specs) else self._config.worker_memory_mb
        if specs[0].kind == "async":
            return AsyncCalls(specs, self._config.max_concurrency, memory_mb, self._heard)
        longest_s = max(map(self._timeout_s, specs))
        return SyncCalls(specs, longest_s, specs[0].workers or self._config.workers, memory_mb, self._heard)

    def _heard(self, call_id: int, answers: Answers) -> None:
        """Called from the runners' threads."""
        self._inbox.put(partial(self._ended, call_id, answers))

    def _timeout_s(self, spec: RewardSpec) -> float:
        return spec.timeout_s or self._config.timeout_s


def _room(spec: RewardSpec) -> str:
    """Where a reward runs: on the event loop, in the shared workers, or in workers of its own."""
    return "async" if spec.kind == "async" else f"sync {spec.name if spec.workers else ''}"


def _rooms(specs: Sequence[RewardSpec]) -> dict[str, tuple[RewardSpec, ...]]:
    rooms: dict[str, tuple[RewardSpec, ...]] = {}
    for spec in specs:
        rooms[_room(spec)] = (*rooms.get(_room(spec), ()), spec)
    return rooms


def _close(runner: SyncCalls | AsyncCalls, end_s: float) -> None:
    runner.close(max(0.0, end_s - time.monotonic()))
