"""Asynchronous rewards: many calls in flight on one event loop in one child process that can be killed.

Never here: the loop itself (`async_worker`), or who waits for a score (`pool`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import queue
import socket
import struct
import threading
import time
from multiprocessing.connection import Pipe, wait

from actors.rewards import Answer, RewardSpec, failed
from actors.scoring.async_worker import serve
from actors.scoring.calls import MAX_FAILED_STARTS, START_LIMIT_S, Answered, Call
from actors.scoring.processes import WorkerContext
from buffers.errors import DeadlineError, RewardError

logger = logging.getLogger(__name__)

# A healthy loop cancels a call at its time-out; this long after it, the loop itself must be blocked.
GRACE_S = 2.0
# Nothing in flight and nobody ringing: look up now and then all the same.
LONGEST_WAIT_S = 60.0


class AsyncCalls:
    """Runs calls of asynchronous rewards, at most `max_concurrency` in flight.

    Owns: one thread, one child process. The thread waits for the child's answers, for the bell that `submit` and
    `close` ring, and for the earliest deadline of a call in flight. On close: the child is killed.
    A child that dies, or leaves a call unanswered past its time-out, is replaced; its calls are answered as failed.
    """

    def __init__(self, specs: tuple[RewardSpec, ...], timeout_s: float, max_concurrency: int, answered: Answered) -> None:
        self._specs = specs
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._answered = answered
        self._waiting: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._closing = False
        self._broken: str | None = None
        self._child: _Child | None = None
        self._thread = threading.Thread(target=self._run, name="async-rewards", daemon=True)
        self._thread.start()
        # multiprocessing waits for its children when the interpreter ends; a pool nobody closed must not hang there.
        atexit.register(self._kill)

    def submit(self, call: Call) -> None:
        self._waiting.put(call)
        self._ring()

    def check(self) -> None:
        """Raises RewardError when the child keeps ending before it is ready, or cannot be started at all."""
        if self._broken is not None or not self._thread.is_alive():
            raise RewardError(self._broken or "the thread of asynchronous rewards has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Kill the child; calls without an answer get none. Raises DeadlineError if it is left after `deadline_s`."""
        self._closing = True
        self._ring()
        self._thread.join(deadline_s)
        self._kill()
        atexit.unregister(self._kill)
        if self._thread.is_alive():
            raise DeadlineError(f"the process of asynchronous rewards did not end within {deadline_s:g} s")
        self._bell.close()
        self._ringer.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # A full bell is ringing already.
            self._ringer.send(b"\0")

    def _kill(self) -> None:
        if self._child is not None:
            self._child.process.kill()

    def _run(self) -> None:
        failed_starts = 0
        while not self._closing and self._broken is None:
            child = self._child = _Child(self._specs, self._timeout_s)
            reason = self._attend(child)
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
            logger.warning("%s; the process is replaced, %d calls failed", reason, len(child.deadlines))
            for call_id in child.deadlines:
                self._answered(call_id, Answer(None, reason))

    def _attend(self, child: _Child) -> str:
        """Serve calls until the child must be replaced; returns why."""
        while not self._closing:
            try:
                self._send_waiting(child)
                patience_s = min(child.earliest_deadline - time.monotonic(), LONGEST_WAIT_S)
                wait([child.connection, self._bell], max(0.0, patience_s))
                self._hush()
                while child.connection.poll():
                    self._receive(child)
            except BlockingIOError:
                return f"timed out: the event loop of asynchronous rewards took no call for {GRACE_S:g} s"
            except (EOFError, OSError):
                return f"the process of asynchronous rewards ended with {child.exit_code()}"
            if time.monotonic() >= child.earliest_deadline:
                if not child.is_ready:
                    return f"the process of asynchronous rewards was not ready within {START_LIMIT_S:g} s"
                return (
                    f"timed out: the event loop of asynchronous rewards was blocked for more than {self._timeout_s:g} s; "
                    f"a reward that does not await belongs in a plain 'def'"
                )
        return "closed"

    def _send_waiting(self, child: _Child) -> None:
        while child.is_ready and len(child.deadlines) < self._max_concurrency:
            try:
                call = self._waiting.get_nowait()
            except queue.Empty:
                return
            child.deadlines[call.id] = time.monotonic() + self._timeout_s + GRACE_S
            try:
                child.connection.send(call)
            except (TypeError, AttributeError, pickle.PicklingError) as error:  # Nothing was sent.
                del child.deadlines[call.id]
                self._answered(call.id, failed(error))

    def _receive(self, child: _Child) -> None:
        message = child.connection.recv()
        if message is None:
            child.is_ready = True
            return
        call_id, answer = message
        del child.deadlines[call_id]
        self._answered(call_id, answer)

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass


class _Child:
    """One child process, its connection, and the deadline of each call in flight, in the order they were sent."""

    def __init__(self, specs: tuple[RewardSpec, ...], timeout_s: float) -> None:
        self.connection, theirs = Pipe()
        # The child reads at once unless a reward holds the interpreter lock; a send must not wait for that for ever.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        self.process = WorkerContext().Process(target=serve, args=(theirs, specs, timeout_s), name="async-rewards")
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.deadlines: dict[int, float] = {}
        self._ready_by = time.monotonic() + START_LIMIT_S

    @property
    def earliest_deadline(self) -> float:
        """Monotonic seconds. All calls have the same time-out, so the first one sent is the first one due."""
        if not self.is_ready:
            return self._ready_by
        return next(iter(self.deadlines.values()), float("inf"))

    def exit_code(self) -> str:
        self.process.join(GRACE_S)
        return f"exit code {self.process.exitcode}"

    def end(self) -> None:
        self.process.kill()
        self.process.join(GRACE_S)
        self.connection.close()
