"""The processes that run rewards: plain ones, one call at a time in each; or one process with asynchronous calls on its loop.

A plain call is killed with its process at its time-out. Asynchronous calls share a process: when one blocks the loop past its
time-out, or refuses to be cancelled, the process is killed, that call fails and the others are made again. Functions that only
this process has run in threads of it, which are left behind where a process would be killed.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler

from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec, failed
from async_rlhf.actors.scoring.reward_worker import Answered, Answers, Call, serve, timed_out
from async_rlhf.actors.workers.pool import LONGEST_WAIT_S, LOOK_S, Worker, WorkerPool
from async_rlhf.actors.workers.process import WorkerThread
from async_rlhf.actors.workers.watchdog import GRACE_S
from async_rlhf.buffers.errors import RewardError

logger = logging.getLogger(__name__)

# Calls that the only process of plain rewards is sent at once; they run one after the other. While one runs nothing is read
# there, so that no more is sent than its socket holds.
_AHEAD, _AHEAD_BYTES = 4, 32 << 10
MAX_STUCK = 32
_TOO_MANY = (
    f"more than {MAX_STUCK} calls of rewards of the calling process ran past their time-out and never ended; put the "
    "function into a .py file, where a call can be killed"
)


class _RewardWorker(Worker):
    """calls: in flight, by id. Plain ones run in their order, the first since `began` (monotonic seconds)."""

    memory_setting = "scoring.worker_memory_mb"

    def __init__(
        self,
        number: int,
        specs: tuple[RewardSpec, ...],
        memory_mb: int | None,
        functions: Mapping[str, RewardFunction] | None,
    ) -> None:
        super().__init__(number, serve, (specs, memory_mb, functions), memory_mb, in_thread=functions is not None)
        self.calls: dict[int, Call] = {}
        self._is_async, self._began = specs[0].kind == "async", 0.0
        self._deadlines: list[tuple[float, int]] = []

    def expect(self, call: Call, now: float) -> None:
        if not self.calls:
            self._began = now
        self.calls[call.id] = call
        if self._is_async:
            heapq.heappush(self._deadlines, (now + call.timeout_s + GRACE_S, call.id))

    def answered(self, call_id: int) -> None:
        del self.calls[call_id]
        self._began = time.monotonic()

    @property
    def first(self) -> Call | None:
        return next(iter(self.calls.values()), None)

    def next_deadline(self) -> tuple[float, int] | None:
        """The earliest of the calls that run, in monotonic seconds, and whose it is."""
        if not self._is_async:
            return None if self.first is None else (self._began + self.first.timeout_s, self.first.id)
        while self._deadlines and self._deadlines[0][1] not in self.calls:
            heapq.heappop(self._deadlines)
        return self._deadlines[0] if self._deadlines else None


class RewardWorkers(WorkerPool[_RewardWorker]):
    """An `Executor`. at_once: calls in each process at once.

    With a worker that dies the call on its loop fails, or all of its calls where none was: these may be tried again, because
    the cause is not known. memory_mb: the limit of each process, None for none. functions: by reward, those of this process.
    """

    error = RewardError

    def __init__(
        self,
        specs: tuple[RewardSpec, ...],
        workers: int,
        at_once: int,
        memory_mb: int | None,
        answered: Answered,
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self._specs, self._memory_mb, self._answered, self._functions = specs, memory_mb, answered, functions
        self._stuck: list[WorkerThread] = []
        self._is_async = specs[0].kind == "async"
        # A call sent ahead waits in the process instead of here, where no other process could take it either.
        self._at_once = at_once if self._is_async or workers > 1 else _AHEAD
        self._waiting: deque[Call] = deque()
        self._packed: dict[int, memoryview] = {}
        self._found: list[tuple[int, Answers]] = []
        names = ", ".join(f"{spec.name} ({spec.target})" for spec in specs)
        super().__init__(workers, f"the worker processes of {names}")

    def submit(self, call: Call) -> None:
        try:
            packed = ForkingPickler.dumps(call)
        except Exception as error:  # noqa: BLE001  a column may be an object of the user's, and raise anything
            self._act(partial(self._answered, call.id, (failed(error),)))
            return
        self._act(partial(self._offer, call, packed))

    def discard(self, call_ids: set[int]) -> None:
        """A call in flight runs to its end."""
        self._act(partial(self._discard, call_ids))

    # -- its thread --------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> _RewardWorker:
        return _RewardWorker(number, self._specs, self._memory_mb, self._functions)

    def _offer(self, call: Call, packed: memoryview) -> None:
        self._stuck = [thread for thread in self._stuck if thread.is_stuck]
        if len(self._stuck) > MAX_STUCK:
            self._answered(call.id, (Answer(None, _TOO_MANY),))
            return
        self._packed[call.id] = packed
        self._waiting.append(call)

    def _answer(self, call_id: int, answers: Answers) -> None:
        del self._packed[call_id]
        self._found.append((call_id, answers))

    def _discard(self, call_ids: set[int]) -> None:
        dropped = [call for call in self._waiting if call.id in call_ids]
        self._waiting = deque(call for call in self._waiting if call.id not in call_ids)
        for call in dropped:
            self._answer(call.id, (Answer(None, "discarded"),))

    def _take(self, worker: _RewardWorker) -> None:
        message = worker.connection.recv()
        if message is None:
            self._is_up(worker)
            return
        call_id, answers = message
        worker.answered(call_id)
        self._answer(call_id, answers)

    def _advance(self) -> None:
        """Calls go first: whoever is woken by an answer would take the interpreter from this thread."""
        while self._waiting:
            free = (worker for worker in self._workers.values() if self._may_send(worker, self._waiting[0]))
            if (worker := next(free, None)) is None:
                break
            self._send(worker, self._waiting.popleft())
        found, self._found = self._found, []
        for call_id, answers in found:
            self._answered(call_id, answers)

    def _may_send(self, worker: _RewardWorker, call: Call) -> bool:
        if not worker.is_ready or not worker.takes or len(worker.calls) >= self._at_once:
            return False
        ahead = 0 if self._is_async or not worker.calls else sum(len(self._packed[id]) for id in (*worker.calls, call.id))
        return ahead <= _AHEAD_BYTES

    def _send(self, worker: _RewardWorker, call: Call) -> None:
        now = time.monotonic()
        worker.expect(call, now)
        self._look_by(now + (LOOK_S if self._is_async else call.timeout_s))
        try:
            worker.connection.send_bytes(self._packed[call.id])
        except BlockingIOError:
            self._replace(worker, f"timed out: the event loop of rewards took no call for {GRACE_S:g} s", worker.running())
        except OSError:  # it has ended, as its connection will show behind the answers that it has sent
            del worker.calls[call.id]
            self._waiting.appendleft(call)
            worker.takes = False

    def _look(self, worker: _RewardWorker, now: float) -> None:
        turn = worker.watchdog.look() if self._is_async else None
        call = None if turn is None else worker.calls.get(turn.id)
        if turn is not None and call is not None and now - turn.since > call.timeout_s:
            reason = (
                f"timed out: it blocked the event loop of asynchronous rewards for more than {call.timeout_s:g} s; "
                "a reward that does not await belongs in a plain 'def'"
            )
            self._replace(worker, reason, call.id)
            return
        deadline = worker.next_deadline()
        if deadline is not None and deadline[0] <= now:
            limit_s = worker.calls[deadline[1]].timeout_s
            refused = (
                f"timed out after {limit_s:g} s and refused to be cancelled for {GRACE_S:g} s more; "
                "let asyncio.CancelledError through"
            )
            self._replace(worker, refused if self._is_async else timed_out(limit_s).failure or "", deadline[1])

    def _lost(self, worker: _RewardWorker, reason: str, cause: int | None) -> None:
        """Of plain calls the first is the cause."""
        if isinstance(worker.process, WorkerThread):
            self._stuck.append(worker.process)
        at_fault = worker.calls.get(-1 if cause is None else cause) if self._is_async else worker.first
        lost = [at_fault] if at_fault is not None else list(worker.calls.values())
        again = [call for call in worker.calls.values() if call not in lost]
        if worker.is_ready:
            logger.warning("%s; the process is replaced, %d calls failed, %d are made again", reason, len(lost), len(again))
        self._waiting.extendleft(reversed(again))
        for call in lost:
            if reason.startswith("timed out"):
                answer = timed_out(call.timeout_s, reason)
            else:
                answer = Answer(None, reason, retry_after_s=None if at_fault is not None else 0.0)
            self._answer(call.id, (answer,))

    def _patience_s(self) -> float:
        deadlines = [found[0] for worker in self._workers.values() if (found := worker.next_deadline()) is not None]
        if not deadlines:
            return LONGEST_WAIT_S
        return LOOK_S if self._is_async else min(deadlines) - time.monotonic()

    def _ended(self) -> None:
        self._answered(-1, ())  # wakes the owner, whose `check` raises if this was not on purpose
