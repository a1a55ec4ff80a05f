"""A pool of processes that run sessions of users' code: calls of rewards, episodes of an environment.

owns        `num_workers` processes, and a thread
waits for   messages of the processes, actions of its owner, the time of its next look at the processes
woken by    these
on close    sessions that clean up have half of the deadline for it; then every process is killed with all that it started

A process is replaced when it dies, is not ready in time, no longer turns, or runs a call in order past its time-out; `book` has
the rules of what becomes of its sessions. When a step that cannot be stopped has exceeded its time, it is retired: its other
sessions go on for `DRAIN_S` at most while a new process takes its place. Workers that end three times in a row before they are
ready end the pool: `check` raises. A thread stands for a process where only this process has the code, and is left behind.
"""

from __future__ import annotations

import atexit
import logging
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

from async_rlhf.actors.workers.book import SessionBook
from async_rlhf.actors.workers.process import LOOK_S, START_LIMIT_S, PoolWorker, WorkerThread, is_over
from async_rlhf.actors.workers.sessions import Closed, Happened, Lost, SessionKind, StartFailed, StepResult, Stopped, serve
from async_rlhf.actors.workers.watchdog import GRACE_S
from async_rlhf.buffers.errors import AsyncRLHFError, DeadlineError
from async_rlhf.buffers.failures import Failure, FailureKind, late, raised, timed_out
from async_rlhf.buffers.transport.frames import Waker

logger = logging.getLogger(__name__)

# Workers that end so often before they are ready will not recover.
MAX_FAILED_STARTS = 3
LONGEST_WAIT_S = 60.0
# Longest time that the other sessions of a retired process have to end.
DRAIN_S = 60.0
# Calls in order that the only process is sent at once. While one runs nothing is read there, so that no more is sent than its
# socket holds. With several, one that waited in a process could have run in another.
_AHEAD, _AHEAD_BYTES = 4, 32 << 10
MAX_STUCK = 32
_TOO_MANY = (
    f"more than {MAX_STUCK} calls of functions of the calling process ran past their time-out and never ended; put the "
    "function into a .py file, where a call can be killed"
)


@dataclass(slots=True)
class _PooledSession:
    """unsent: packed, what it is to begin or to go on with. size: of the first, in bytes. has_begun: its
    process has been sent that."""

    key: Hashable
    timeout_s: float
    unsent: list[memoryview]
    size: int
    has_begun: bool = False


class WorkerPool:
    """`Sessions` in processes; see the module docstring."""

    def __init__(self, kind: SessionKind, num_workers: int, what: str, error: type[AsyncRLHFError], happened: Happened) -> None:
        """what: whose processes these are, for messages; error: raised by `check`."""
        self._kind, self._num_workers, self._what, self._error, self._happened = kind, num_workers, what, error, happened
        self._ahead = _AHEAD if num_workers == 1 else 1
        self._book = SessionBook()
        self._sessions: dict[int, _PooledSession] = {}
        # Ids of those without a process, and of those that have one and are to step, in the order in which they came.
        self._unplaced: dict[int, None] = {}
        self._unsent: dict[int, None] = {}
        self._found: list[StepResult | Closed | Lost] = []
        self._stuck: list[WorkerThread] = []
        self._workers: dict[int, PoolWorker] = {}
        self._num_started = self._failed_starts = 0
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._own_actions: deque[Callable[[], object]] = deque()  # the thread's own
        self._waker, self._is_rung = Waker(), False
        # Kept from wait to wait: a call of a quick reward costs little more than its messages.
        self._poll, self._by_descriptor = select.poll(), dict[int, PoolWorker]()
        self._poll.register(self._waker.descriptor, select.POLLIN)
        self._look_at = 0.0
        self._alarm: tuple[float, Callable[[], object]] | None = None
        self._closing_by: float | None = None
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()
        # multiprocessing joins its children at interpreter exit; a pool that was not closed must not hang there.
        atexit.register(self._kill)

    def begin(self, id: int, key: Hashable, what: Any, timeout_s: float) -> None:
        try:
            packed = ForkingPickler.dumps(("begin", id, what))
        except Exception as error:  # noqa: BLE001  a column may be an object of the user's, and raise anything
            self.do(partial(self._fail, id, raised(error)._replace(kind=FailureKind.UNREADABLE)))
            return
        self.do(partial(self._begin, id, _PooledSession(key, timeout_s, [packed], len(packed))))

    def reply(self, id: int, sent: Any) -> None:
        self.do(partial(self._reply, id, ForkingPickler.dumps(("reply", id, sent))))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self.do(partial(self._discard, ids, keys))

    def do(self, action: Callable[[], object]) -> None:
        if threading.get_ident() == self._thread.ident:
            self._own_actions.append(action)
            return
        self._actions.put(action)
        if not self._is_rung:  # a rung thread has yet to look at its actions
            self._is_rung = True
            self._waker.ring()

    def at(self, when: float, action: Callable[[], object]) -> None:
        self._alarm = when, action

    def num_sessions(self) -> int:
        """Those in the processes, that are being cleaned up included."""
        return sum(len(self._book.sessions(number)) for number in tuple(self._workers))

    def check(self) -> None:
        """Raises the pool's error when its processes do not come up."""
        if self._broken is not None or not self._thread.is_alive():
            raise self._error(self._broken or f"the thread of {self._what} has ended; see the log for its error")

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
        self._workers, self._by_descriptor = {}, {}  # with the descriptors that they hold
        self._waker.close()

    def _kill(self) -> None:
        for worker in tuple(self._workers.values()):
            worker.process.kill()

    # -- its thread: sessions ----------------------------------------------------------------------------------------

    def _begin(self, id: int, session: _PooledSession) -> None:
        self._stuck = [thread for thread in self._stuck if thread.is_stuck]
        if len(self._stuck) > MAX_STUCK:
            self._fail(id, Failure(FailureKind.DIED, _TOO_MANY))
            return
        self._sessions[id] = session
        self._unplaced[id] = None

    def _reply(self, id: int, packed: memoryview) -> None:
        if self._book.phase(id) in ("waiting", "stepping"):  # Else it has just been lost.
            self._sessions[id].unsent.append(packed)
            self._unsent[id] = None

    def _discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._book.forget(keys)
        for id in ids:
            self._unsent.pop(id, None)
            if (session := self._sessions.get(id)) is None:
                continue
            if not session.has_begun:
                self._unplaced.pop(id, None)
                self._over(Closed(id))
            elif self._book.phase(id) != "closing":
                self._book.enter(id, "closing")
                if self._kind.at_once is not None and (number := self._book.worker_of(id)) is not None:
                    self._send(self._workers[number], ForkingPickler.dumps(("close", id, None)))

    def _advance(self) -> None:
        """Messages go first: whoever is woken by a result would take the interpreter from this thread."""
        while self._unplaced:
            id = next(iter(self._unplaced))
            if self._book.place(id, self._sessions[id].key, partial(self._has_room, self._sessions[id].size)) is None:
                break
            del self._unplaced[id]
            self._unsent[id] = None
        for id in tuple(self._unsent):
            number = self._book.worker_of(id)
            if number is None:  # It has been lost, while another's message was sent.
                self._unsent.pop(id, None)
            elif self._book.step(id):
                del self._unsent[id]
                self._go_on(id, self._sessions[id], self._workers[number])
        found, self._found = self._found, []
        for came in found:
            self._happened(came)

    def _has_room(self, size: int, number: int) -> bool:
        inside = self._book.sessions(number)
        if self._kind.at_once is not None or not inside:
            return True
        return len(inside) < self._ahead and size + sum(self._sessions[id].size for id in inside) <= _AHEAD_BYTES

    def _go_on(self, id: int, session: _PooledSession, worker: PoolWorker) -> None:
        unsent, session.unsent = session.unsent, []
        now = time.monotonic()
        if next(iter(self._book.sessions(worker.number))) == id:
            worker.began = now
        self._look_at = min(self._look_at, now + LOOK_S)
        was_begun, session.has_begun = session.has_begun, True
        if not all(self._send(worker, each) for each in unsent) and not was_begun:  # it has ended, and never began this
            self._book.closed(id)
            session.unsent, session.has_begun = unsent, False
            self._unplaced = {id: None, **self._unplaced}
            self._retire(worker)

    def _send(self, worker: PoolWorker, packed: memoryview) -> bool:
        """False where the process has ended, as its connection will show behind what it has sent."""
        try:
            worker.connection.send_bytes(packed)
        except BlockingIOError:
            self._replace(worker, timed_out(f"timed out: its process took no message for {GRACE_S:g} s"), worker.causes())
        except OSError:
            return False
        return True

    def _over(self, came: StepResult | Closed | Lost) -> None:
        """Nothing is left of a session."""
        self._book.closed(came.id)
        self._sessions.pop(came.id, None)
        self._found.append(came)

    def _fail(self, id: int, why: Failure) -> None:
        session, now = self._sessions.get(id), time.time()
        took_s = session.timeout_s if session is not None and why.kind is FailureKind.TIMED_OUT else 0.0
        self._over(StepResult(id, why, now - took_s, now))

    def _take(self, worker: PoolWorker) -> None:
        message: StepResult | Closed | StartFailed | None = worker.connection.recv()
        if message is None:
            worker.is_ready, self._failed_starts = True, 0
            self._book.open(worker.number)
            return
        if isinstance(message, StartFailed):
            worker.failure = message.reason
            return
        is_passed_on = self._book.heard(message.id, message.after)
        if message.after == "over":
            worker.began = time.monotonic()
            self._over(message if is_passed_on or isinstance(message, Closed) else Closed(message.id))
        elif is_passed_on:
            self._found.append(message)
        if message.retire and worker.takes:
            logger.warning("one of %s is replaced: a step in it cannot be stopped", self._what)
            self._retire(worker)
        if self._has(worker) and self._book.has_drained(worker.number):
            self._end_retired(worker)

    # -- its thread: processes ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing_by is None and self._broken is None:
                self._start_missing()
                self._turn(self._look_at)
            if self._closing_by is not None and self._kind.cleans_up:
                self._discard(tuple(self._sessions), ())
                while self.num_sessions() and (left_s := self._closing_by - time.monotonic()) > 0:
                    self._turn(time.monotonic() + min(LOOK_S, left_s))
        finally:
            self._kill()  # all at once, before any is waited for
            for worker in self._workers.values():
                worker.end()
            self._happened(Stopped())

    def _turn(self, until: float) -> None:
        """Wait for something, until so many monotonic seconds, and see to all of it."""
        # What is asked for later waits for the next turn, which first sees whose process has ended by then.
        num_actions = self._actions.qsize()
        until = until if self._alarm is None else min(until, self._alarm[0])
        wait_ms = 0 if num_actions or self._own_actions else max(0.0, 1000 * (until - time.monotonic()))
        ready = [descriptor for descriptor, _ in self._poll.poll(wait_ms)]
        workers = [self._by_descriptor[descriptor] for descriptor in ready if descriptor in self._by_descriptor]
        if len(workers) < len(ready):
            self._waker.clear()
            self._is_rung = False
        for worker in workers:
            if self._has(worker):
                # One message; the next turn shows whether there are more, and looking for them here would cost as much.
                try:
                    self._take(worker)
                except (EOFError, OSError):
                    self._replace(worker, Failure(FailureKind.DIED, worker.ended()), worker.causes())
        for _ in range(num_actions):
            self._actions.get_nowait()()
        now = time.monotonic()
        if self._alarm is not None and now >= self._alarm[0]:
            (_, action), self._alarm = self._alarm, None
            action()
        while self._own_actions:
            self._own_actions.popleft()()
        if now >= self._look_at:
            self._look_at_all(now)
        self._advance()

    def _look_at_all(self, now: float) -> None:
        for worker in tuple(self._workers.values()):
            if not self._has(worker):
                continue
            if not worker.is_ready:
                if now >= worker.ready_by:
                    self._replace(worker, Failure(FailureKind.DIED, f"it was not ready within {START_LIMIT_S:g} s"))
            elif worker.retired_until is not None and worker.retired_until < now:
                self._end_retired(worker)
            elif self._book.sessions(worker.number):
                self._look(worker, now)
        idle = all(each.is_ready and each.takes and not self._book.sessions(n) for n, each in self._workers.items())
        self._look_at = now + (LONGEST_WAIT_S if idle else LOOK_S)

    def _look(self, worker: PoolWorker, now: float) -> None:
        """Replace a process that no longer turns, or runs a call in order for too long."""
        inside = self._book.sessions(worker.number)
        if self._kind.at_once is None:
            limit_s = self._sessions[next(iter(inside))].timeout_s
            if now - worker.began >= limit_s:
                self._replace(worker, late(limit_s, self._kind.timeout_setting))
            return
        on_loop = worker.running()
        cause = on_loop if on_loop in inside else None
        limit_s = max(self._sessions[id].timeout_s for id in (inside if cause is None else [cause]))
        if worker.silent_s(now) <= limit_s + GRACE_S:
            return
        if not worker.takes:
            self._end_retired(worker)
            return
        limit = f"for more than {limit_s:g} s ({self._kind.timeout_setting})"
        if cause is None:
            self._replace(worker, Failure(FailureKind.DIED, f"its process did not answer {limit}"))
        else:
            blocked = f"timed out: it blocked the event loop {limit}; a step that does not await belongs in a plain 'def'"
            self._replace(worker, timed_out(blocked), [cause])

    def _has(self, worker: PoolWorker) -> bool:
        return self._workers.get(worker.number) is worker

    def _start_missing(self) -> None:
        while sum(worker.takes for worker in self._workers.values()) < self._num_workers:
            self._num_started += 1
            try:
                worker = PoolWorker(self._num_started, serve, self._kind)
            except OSError as error:
                self._broken = f"none of {self._what} could be started: {error}"
                return
            self._look_at = min(self._look_at, time.monotonic() + LOOK_S)
            self._workers[worker.number] = self._by_descriptor[worker.connection.fileno()] = worker
            self._poll.register(worker.connection, select.POLLIN)

    def _retire(self, worker: PoolWorker) -> None:
        self._book.retire(worker.number)
        worker.retired_until = time.monotonic() + DRAIN_S
        retired = [each for each in self._workers.values() if not each.takes]
        if len(retired) > self._num_workers:  # So there are never more than twice as many processes.
            self._end_retired(retired[0])

    def _end_retired(self, worker: PoolWorker) -> None:
        """Its cause is known, and has failed already."""
        self._replace(worker, Failure(FailureKind.DIED, "it was retired"), ())

    def _replace(self, worker: PoolWorker, why: Failure, causes: Collection[int] | None = None) -> None:
        """End a worker. causes: the sessions for whose code it must end; None: not known, but of calls in order it is the
        first."""
        del self._workers[worker.number], self._by_descriptor[worker.connection.fileno()]
        self._poll.unregister(worker.connection)
        worker.end()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._broken = (
                    f"{self._what} ended {self._failed_starts} times in a row before they were ready: {why.reason}; see what "
                    "they wrote to stderr, and try the import in a fresh interpreter"
                )
        if isinstance(worker.process, WorkerThread):
            self._stuck.append(worker.process)
        if self._kind.at_once is None and causes is None:
            causes = [*self._book.sessions(worker.number)][:1]
        left = self._book.died(worker.number, causes)
        if worker.takes:
            what = "thread is left behind" if self._kind.in_thread else "process is replaced"
            logger.warning("%s; the %s, %d sessions failed, %d begin again", why.reason, what, len(left.failed), len(left.lost))
        twice = "its process ended twice while it was in a step: " if causes is None else ""
        for id in left.failed:
            self._fail(id, why._replace(reason=twice + why.reason))
        for id in left.lost:
            self._over(Lost(id))
        for id in left.over:
            self._over(Closed(id))
