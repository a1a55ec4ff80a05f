"""The executor of asynchronous rewards: many calls in flight on one event loop, in one child process that can be killed.

The loop itself is in `event_loop_worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections import deque
from multiprocessing.connection import Pipe, wait

from async_rlhf.actors.rewards import Answer, RewardSpec, failed
from async_rlhf.actors.scoring.event_loop_worker import SHOW_STACK, LoopWatchdog, serve
from async_rlhf.actors.scoring.executor import MAX_FAILED_STARTS, START_LIMIT_S, Answered, Call
from async_rlhf.actors.scoring.processes import END_S, WorkerContext, ended, is_over
from async_rlhf.buffers.errors import DeadlineError, RewardError
from async_rlhf.buffers.transport.frames import Waker

logger = logging.getLogger(__name__)

# A healthy loop cancels a call at its time-out; this long after it, the call itself must refuse to end.
GRACE_S = 2.0
# One step of a coroutine that takes longer delays every other call, and is logged once for each reward.
LONG_TURN_S = 1.0
# While calls are in flight, how often to check whether one of them blocks the loop.
LOOK_S = 0.25
# The longest wait while nothing is in flight.
LONGEST_WAIT_S = 60.0


class EventLoopExecutor:
    """Runs at most `max_concurrency` calls at once. Owns one thread and one child process.

    The thread waits for the child's answers, for `submit` and `close`, for the earliest deadline in flight, and checks four
    times a second which call runs on the loop. A child that dies, or in which a call blocks the loop past its time-out or
    refuses to be cancelled, is replaced: the call at fault fails, the others restart. Without a known call at fault all fail.
    """

    def __init__(self, specs: tuple[RewardSpec, ...], max_concurrency: int, memory_mb: int | None, answered: Answered) -> None:
        self._specs = specs
        self._memory_mb = memory_mb
        self._max_concurrency = max_concurrency
        self._answered = answered
        self._waiting: deque[Call] = deque()
        self._reported: set[str] = set()
        self._waker = Waker()
        self._closing = False
        self._broken: str | None = None
        self._child: _Child | None = None
        self._thread = threading.Thread(target=self._run, name="async-rewards", daemon=True)
        self._thread.start()
        # multiprocessing joins its children at interpreter exit; a pool that was not closed must not hang there.
        atexit.register(self._kill)

    def submit(self, call: Call) -> None:
        self._waiting.append(call)
        self._waker.ring()

    def discard(self, call_ids: set[int]) -> None:
        """A call in flight runs to its end."""

    def check(self) -> None:
        """Raises RewardError when the child keeps ending before it is ready, or cannot be started at all."""
        if self._broken is not None or not self._thread.is_alive():
            raise RewardError(self._broken or "the thread of asynchronous rewards has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        by = time.monotonic() + deadline_s
        self._closing = True
        self._waker.ring()
        self._thread.join(deadline_s)
        self._kill()
        atexit.unregister(self._kill)
        if self._thread.is_alive() or (self._child is not None and not is_over(self._child.process, by - time.monotonic())):
            raise DeadlineError(f"the process of asynchronous rewards did not end within {deadline_s:g} s")
        self._waker.close()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.process.kill()

    def _run(self) -> None:
        failed_starts = 0
        while not self._closing and self._broken is None:
            child = self._child = _Child(self._specs, self._memory_mb)
            reason, at_fault = self._attend(child)
            child.end()
            if self._closing:
                return
            failed_starts = 0 if child.is_ready else failed_starts + 1
            if failed_starts >= MAX_FAILED_STARTS:
                names = ", ".join(f"{spec.name} ({spec.target})" for spec in self._specs)
                self._broken = (
                    f"the process of asynchronous rewards {names} ended {failed_starts} times in a row before it was "
                    f"ready: {reason}; see what it wrote to stderr, and try the import in a fresh interpreter"
                )
            self._lose(child, reason, at_fault)

    def _lose(self, child: _Child, reason: str, at_fault: Call | None) -> None:
        """Everything in flight is lost with the child: the call at fault fails, the others restart."""
        lost = [at_fault] if at_fault is not None else list(child.calls.values())
        again = [call for call in child.calls.values() if call not in lost]
        logger.warning("%s; the process is replaced, %d calls failed, %d restart", reason, len(lost), len(again))
        self._waiting.extendleft(reversed(again))
        for call in lost:
            self._answered(call.id, (Answer(None, reason, retry_after_s=0.0),))

    def _attend(self, child: _Child) -> tuple[str, Call | None]:
        """Serve calls until the child must be replaced; returns why, and the call that made it necessary if one did."""
        while not self._closing:
            try:
                self._send_waiting(child)
                ready = wait([child.connection, self._waker.descriptor], max(0.0, child.patience_s()))
                if self._waker.descriptor in ready:
                    self._waker.clear()
                while child.connection.poll():
                    self._receive(child)
            except BlockingIOError:
                return f"timed out: the event loop of asynchronous rewards took no call for {GRACE_S:g} s", child.running()
            except (EOFError, OSError):
                return child.ended(), child.running()
            if (ends := self._look(child)) is not None:
                return ends
        return "closed", None

    def _look(self, child: _Child) -> tuple[str, Call | None] | None:
        """Why the child must be replaced: it never got ready, a call blocks its loop, or refuses to end."""
        now = time.monotonic()
        if not child.is_ready:
            late = now >= child.ready_by
            return (f"the process of asynchronous rewards was not ready within {START_LIMIT_S:g} s", None) if late else None
        call, turn_s = child.turn(now)
        if call is not None and turn_s > min(LONG_TURN_S, call.timeout_s) and call.spec.name not in self._reported:
            self._reported.add(call.spec.name)
            logger.warning("reward %r has kept the event loop to itself for %.1f s; its stack follows", call.spec.name, turn_s)
            child.show_stack()
        if call is not None and turn_s > call.timeout_s:
            return (
                f"timed out: it blocked the event loop of asynchronous rewards for more than {call.timeout_s:g} s; "
                "a reward that does not await belongs in a plain 'def'",
                call,
            )
        if (late_call := child.overdue(now)) is not None:
            return (
                f"timed out after {late_call.timeout_s:g} s and refused to be cancelled for {GRACE_S:g} s more; "
                "let asyncio.CancelledError through",
                late_call,
            )
        return None

    def _send_waiting(self, child: _Child) -> None:
        while child.is_ready and self._waiting and len(child.calls) < self._max_concurrency:
            call = self._waiting.popleft()
            child.expect(call)
            try:
                child.connection.send(call)
            except (TypeError, AttributeError, pickle.PicklingError) as error:  # Nothing was sent.
                del child.calls[call.id]
                self._answered(call.id, (failed(error),))

    def _receive(self, child: _Child) -> None:
        message = child.connection.recv()
        if message is None:
            child.is_ready = True
            return
        call_id, answers = message
        del child.calls[call_id]
        self._answered(call_id, answers)


class _Child:
    """One child process, its connection, the calls in flight by id, and their deadlines in monotonic seconds."""

    def __init__(self, specs: tuple[RewardSpec, ...], memory_mb: int | None) -> None:
        self._memory_mb = memory_mb
        self.connection, theirs = Pipe()
        # A reward that holds the interpreter lock keeps the child from reading; a send has a deadline.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        self._watchdog = LoopWatchdog()
        self.process = WorkerContext().Process(
            target=serve, args=(theirs, specs, memory_mb, self._watchdog), name="async-rewards"
        )
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.calls: dict[int, Call] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.ready_by = time.monotonic() + START_LIMIT_S

    def expect(self, call: Call) -> None:
        self.calls[call.id] = call
        heapq.heappush(self._deadlines, (time.monotonic() + call.timeout_s + GRACE_S, call.id))

    def overdue(self, now: float) -> Call | None:
        """A call past its deadline."""
        while self._deadlines and self._deadlines[0][1] not in self.calls:
            heapq.heappop(self._deadlines)
        return self.calls[self._deadlines[0][1]] if self._deadlines and self._deadlines[0][0] <= now else None

    def patience_s(self) -> float:
        """The longest wait before the next check."""
        if not self.is_ready:
            return self.ready_by - time.monotonic()
        return LOOK_S if self.calls else LONGEST_WAIT_S

    def turn(self, now: float) -> tuple[Call | None, float]:
        """The call that runs on the loop, and for how long."""
        turn = self._watchdog.look()
        return (None, 0.0) if turn is None else (self.calls.get(turn.call_id), now - turn.since)

    def running(self) -> Call | None:
        return self.turn(time.monotonic())[0]

    def show_stack(self) -> None:
        """The child writes the stack of its main thread to stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, SHOW_STACK)

    def ended(self) -> str:
        """Why the process ended."""
        is_over(self.process, END_S)
        return ended(self.process.exitcode, self._memory_mb)

    def end(self) -> None:
        self.process.kill()
        if not is_over(self.process, END_S):
            logger.warning("process %s of asynchronous rewards was killed and still runs after %g s", self.process.pid, END_S)
        self.connection.close()
