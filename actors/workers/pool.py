"""A pool of worker processes and the thread that looks after them: what rewards and environments have in common.

owns        `num_workers` processes, and a thread
waits for   messages of the processes, actions of its owner, the time of its next look at the processes
woken by    these
on close    `_drain`, then every process is killed with all that it started

A worker that dies, is not ready in time, or is given up by `_look` is killed and replaced. Workers that end three times in a
row before they are ready end the pool: `check` raises. A kind of pool adds what its messages mean, and what becomes of the
sessions of a worker that has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any, ClassVar, Generic, TypeVar

from async_rlhf.actors.workers.process import WorkerContext, WorkerProcess, WorkerThread, ended, is_over
from async_rlhf.actors.workers.watchdog import GRACE_S, LoopWatchdog
from async_rlhf.buffers.errors import DeadlineError, WireError
from async_rlhf.buffers.transport.frames import Waker

logger = logging.getLogger(__name__)

# Longest time a worker may take to import its user's code, models it loads at import included.
START_LIMIT_S = 300.0
# Workers that end so often before they are ready will not recover.
MAX_FAILED_STARTS = 3
LOOK_S = 0.25
"""How often to look at workers whose loop may be blocked."""
END_S = 10.0
"""How long a process that was killed may be kept from the processor."""
LONGEST_WAIT_S = 60.0


class Worker:
    """One process and the parent's end of its connection.

    serve: runs in the process, with its end of the connection, the watchdog and the arguments. in_thread: it is a thread of
    this process instead. is_ready: it has loaded its user's code; failure: why it cannot, "" where no reason came. takes: it
    gets new sessions. ready_by: monotonic seconds.
    """

    memory_setting: ClassVar[str]

    def __init__(
        self, number: int, serve: Callable[..., None], arguments: tuple[Any, ...], memory_mb: int | None, in_thread: bool
    ) -> None:
        """Raises OSError where no process can be started."""
        self.number, self._memory_mb = number, memory_mb
        self.connection, theirs = Pipe()
        # Code that holds the interpreter lock keeps the process from reading; a send has a deadline.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        self.watchdog = LoopWatchdog()
        kind: Callable[..., WorkerProcess | WorkerThread] = WorkerThread if in_thread else WorkerContext().Process
        self.process = kind(target=serve, args=(theirs, self.watchdog, *arguments), name="worker")
        try:
            self.process.start()
        except BaseException:  # an interrupt too: the pipe must not outlive a start that was given up
            self.connection.close()
            theirs.close()
            raise
        if not in_thread:
            theirs.close()
        self.is_ready, self.takes, self.failure = False, True, ""
        self.ready_by = time.monotonic() + START_LIMIT_S

    def running(self) -> int | None:
        """The session whose code is on the event loop right now, or was when the process died."""
        turn = self.watchdog.look()
        return None if turn is None else turn.id

    def ended(self) -> str:
        """Why the process ended, which it has, or is about to."""
        is_over(self.process, END_S)
        return self.failure or ended(self.process.exitcode, self._memory_mb, self.memory_setting)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Kill it, and all it started."""
        self.process.kill()
        if not is_over(self.process, END_S):
            logger.warning("worker process %s was killed and still runs after %g s", self.process.pid, END_S)
        self.connection.close()


Kind = TypeVar("Kind", bound=Worker)


class WorkerPool(Generic[Kind]):
    """See the module docstring. what: whose processes these are, for messages; error: raised by `check`."""

    error: ClassVar[type[Exception]]

    def __init__(self, num_workers: int, what: str) -> None:
        self._num_workers, self._what = num_workers, what
        self._workers: dict[int, Kind] = {}
        self._num_started = self._failed_starts = 0
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waker, self._is_rung = Waker(), False
        # Kept from wait to wait: a call of a quick reward costs little more than its messages.
        self._poll, self._by_descriptor = select.poll(), dict[int, Kind]()
        self._poll.register(self._waker.descriptor, select.POLLIN)
        self._look_at = 0.0
        self._closing_by: float | None = None
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()
        # multiprocessing joins its children at interpreter exit; a pool that was not closed must not hang there.
        atexit.register(self._kill)

    def check(self) -> None:
        """Raises the pool's error when its processes do not come up."""
        if self._broken is not None or not self._thread.is_alive():
            raise self.error(self._broken or f"the thread of {self._what} has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if something is left after `deadline_s`. A second call does nothing."""
        if self._closing_by is not None:
            return
        by = time.monotonic() + deadline_s
        self._closing_by = by - deadline_s / 2
        self._waker.ring()
        self._thread.join(deadline_s)
        self._kill()
        atexit.unregister(self._kill)
        left = [worker for worker in self._workers.values() if not is_over(worker.process, by - time.monotonic())]
        if self._thread.is_alive() or left:
            raise DeadlineError(f"{self._what} did not end within {deadline_s:g} s")
        self._waker.close()

    def _kill(self) -> None:
        for worker in tuple(self._workers.values()):
            worker.kill()

    def _act(self, action: Callable[[], object]) -> None:
        """To be done by the thread."""
        self._actions.put(action)
        # Else it has not looked at its actions since, or is just acting itself.
        if not self._is_rung and threading.get_ident() != self._thread.ident:
            self._is_rung = True
            self._waker.ring()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing_by is None and self._broken is None:
                self._start_missing()
                self._turn(self._look_at)
            if self._closing_by is not None:
                self._drain(self._closing_by)
        finally:
            self._kill()  # all at once, before any is waited for
            for worker in self._workers.values():
                worker.end()
            self._ended()

    def _turn(self, until: float) -> None:
        """Wait for something, until so many monotonic seconds, and see to all of it."""
        wait_ms = max(0.0, 1000 * (until - time.monotonic())) if self._actions.empty() else 0
        ready = [descriptor for descriptor, _ in self._poll.poll(wait_ms)]
        workers = [self._by_descriptor[descriptor] for descriptor in ready if descriptor in self._by_descriptor]
        if len(workers) < len(ready):
            self._waker.clear()
            self._is_rung = False
        for worker in workers:
            if self._has(worker):
                self._receive(worker)
        for _ in range(self._actions.qsize()):
            self._actions.get_nowait()()
        if (now := time.monotonic()) >= self._look_at:
            self._look_at_all(now)
        self._advance()

    def _look_at_all(self, now: float) -> None:
        for worker in tuple(self._workers.values()):
            if not self._has(worker):
                continue
            if worker.is_ready:
                self._look(worker, now)
            elif now >= worker.ready_by:
                self._replace(worker, f"it was not ready within {START_LIMIT_S:g} s", None)
        starting = any(not worker.is_ready for worker in self._workers.values())
        self._look_at = now + (LOOK_S if starting else self._patience_s())

    def _look_by(self, when: float) -> None:
        """Not later than so many monotonic seconds."""
        if when < self._look_at:
            self._look_at = when

    def _has(self, worker: Kind) -> bool:
        return self._workers.get(worker.number) is worker

    def _receive(self, worker: Kind) -> None:
        """One message; the next turn shows whether there are more, and looking for them here would cost as much."""
        try:
            self._take(worker)
        except (EOFError, OSError, WireError) as error:
            self._replace(worker, str(error) if isinstance(error, WireError) else worker.ended(), worker.running())

    def _start_missing(self) -> None:
        while sum(worker.takes for worker in self._workers.values()) < self._num_workers:
            self._num_started += 1
            try:
                worker = self._start(self._num_started)
            except OSError as error:
                self._broken = f"no process could be started for {self._what}: {error}"
                return
            self._look_by(time.monotonic() + LOOK_S)
            self._workers[worker.number] = self._by_descriptor[worker.connection.fileno()] = worker
            self._poll.register(worker.connection, select.POLLIN)

    def _is_up(self, worker: Kind) -> None:
        worker.is_ready = True
        self._failed_starts = 0

    def _replace(self, worker: Kind, reason: str, cause: int | None) -> None:
        """End a worker. cause: the session for whose code it must end, where it is known."""
        del self._workers[worker.number], self._by_descriptor[worker.connection.fileno()]
        self._poll.unregister(worker.connection)
        worker.end()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._broken = (
                    f"{self._what} ended {self._failed_starts} times in a row before they were ready: {reason}; see what they "
                    "wrote to stderr, and try the import in a fresh interpreter"
                )
        self._lost(worker, reason, cause)

    # -- what a kind of pool adds ------------------------------------------------------------------------------------

    def _start(self, number: int) -> Kind:
        raise NotImplementedError

    def _take(self, worker: Kind) -> None:
        """Receive one message. Raises EOFError, OSError or WireError for a worker that is to be replaced."""
        raise NotImplementedError

    def _look(self, worker: Kind, now: float) -> None:
        """Replace a worker that is stuck."""
        raise NotImplementedError

    def _advance(self) -> None:
        """Send what may be sent."""
        raise NotImplementedError

    def _lost(self, worker: Kind, reason: str, cause: int | None) -> None:
        """What becomes of the sessions of a worker that has ended."""
        raise NotImplementedError

    def _patience_s(self) -> float:
        """Longest wait before the next look, where no session begins meanwhile (`_look_by`)."""
        return LONGEST_WAIT_S

    def _drain(self, by: float) -> None:
        """Let sessions end; until so many monotonic seconds."""

    def _ended(self) -> None:
        """The thread ends."""
