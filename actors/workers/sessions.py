"""The process that runs sessions of users' code. Started and killed by `pool`.

owns        its sessions, and threads for steps that block
waits for   messages (in a thread of its own, so that the owner can always send), steps, the time-out of each
woken by    these
on close    it is killed; sessions that clean up have been closed before

    owner -> process   Order: begin, reply, close
    process -> owner   None once the user's code is imported, or StartFailed; StepResult, Closed

Each begin and each reply is a step, and answered by one StepResult, unless it gave nothing: the session has a further step by
itself once there is something. A session is over with Closed, after its cleanup, or with its last StepResult where there is
none to run. An id names a session of one owner's life.

Sessions run on an event loop, many at once; or in order, each a single call that only the end of the process stops. A blocked
loop cannot report itself: the process writes into shared memory that its loop turns and which session runs on it (`watchdog`).
Code that only the owner's process has runs the same way in a thread there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, Protocol

from async_rlhf.actors.workers.book import After
from async_rlhf.actors.workers.process import OUT_OF_MEMORY, end_worker, ended, obey_parent
from async_rlhf.actors.workers.watchdog import GRACE_S, LoopWatchdog
from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.failures import Failure, FailureKind, late, timed_out

# How often the loop shows that it turns.
PULSE_S = 0.2


Order = tuple[Literal["begin", "reply", "close"], int, Any]
"""To a session, by its id: what it is about, what the model wrote in its turn, or that nothing more is wanted of it. A plain
tuple, which costs a quarter of the time to pack that a named one does."""


class StartFailed(NamedTuple):
    """The user's code cannot be imported; the process ends."""

    reason: str


class Nothing:
    """The result of a step that gave none: another will, without being asked."""


NOTHING = Nothing()


class StepResult(NamedTuple):
    """The result of one step, as its kind makes it, or why there is none (Failure). began, ended: of the step, in seconds since
    the epoch. after: what its session is then. retire: as of Closed."""

    id: int
    result: Any
    began: float = 0.0
    ended: float = 0.0
    after: After = "over"
    retire: bool = False


class Closed(NamedTuple):
    """Nothing is left of a session that had ended or was discarded. failure: what its cleanup raised. retire: something of it
    runs on and cannot be stopped, or memory ran out: its process should take no further sessions."""

    id: int
    failure: str = ""
    retire: bool = False
    after: After = "over"


class Lost(NamedTuple):
    """The process died because of another session. This one did not fail; its owner may start it again."""

    id: int


class Stopped(NamedTuple):
    """There are no more sessions; `Sessions.check` has the reason."""


Happened = Callable[[StepResult | Closed | Lost | Stopped], object]
"""Takes what became of a session. Called from the thread of the sessions."""


class Sessions(Protocol):
    """Where sessions run: processes of this one (`pool.WorkerPool`), or a server (`client.RemoteSessions`). Nothing waits here.

    It has a thread, which tells its owner (`Happened`): of a StepResult for each `begin` and each reply; of Lost in its place;
    of Closed once nothing is left of a session that was discarded or had to clean up.
    """

    def begin(self, id: int, key: Hashable, what: Any, timeout_s: float) -> None:
        """key: names what is begun again as another session. timeout_s: of a step."""

    def reply(self, id: int, sent: Any) -> None:
        """Sends the model's text of its turn."""

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        """Close these sessions, as soon as their steps end or can be stopped; the keys are not begun again."""

    def do(self, action: Callable[[], object]) -> None:
        """In its thread, in the order of these calls."""

    def at(self, when: float, action: Callable[[], object]) -> None:
        """In its thread at that time (monotonic seconds), once; instead of what was to be done so before. Called there."""

    def check(self) -> None:
        """Raises an error when it cannot recover."""

    def close(self, deadline_s: float) -> None:
        """Kills what runs, after half of the deadline for what cleans up. Raises DeadlineError if something is left."""


class Session(Protocol):
    """In its process. stoppable: a step that is cancelled ends. timeout_s: of a step, and of closing. whole_timeout_s: of all
    of it, None for no limit."""

    stoppable: bool
    timeout_s: float
    whole_timeout_s: float | None

    @property
    def more(self) -> Future[None] | None:
        """As of the newest step: done where a step that is sent nothing has a result."""

    def step(self, sent: Any) -> asyncio.Future[Any]:
        """The result of the step; raises only MemoryError: its process must be replaced. sent: the model's text, None at
        first."""

    def close(self) -> asyncio.Future[str]:
        """Run its cleanup; the result is what that raised, "" for nothing."""

    def ends(self, result: Any) -> bool:
        """Whether no step follows."""


class SessionKind(Protocol):
    """A kind of sessions of a pool. Each of its processes is given a copy; threads share it.

    timeout_setting, memory_setting: what failures call the limits. memory_mb: of a process, None for none, as of threads.
    at_once: steps on one loop; None: in order. cleans_up: its sessions have something to close. in_thread: only the owner's
    process has the code.
    """

    timeout_setting: str
    memory_setting: str
    memory_mb: int | None
    at_once: int | None
    cleans_up: bool
    in_thread: bool

    def load(self) -> None:
        """Import the user's code; each process calls it once, each thread too. Raises AsyncRLHFError where no session can be
        begun without it."""

    def call(self, what: Any) -> Any:
        """The result of a session in order; never raises."""

    def begin(self, id: int, what: Any, watchdog: LoopWatchdog) -> Session:
        """A session on the loop; never raises."""


def _sent(connection: Connection, message: StartFailed | None) -> bool:
    """Whether the owner still reads: it may have closed before a thread was ready."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True


def serve(connection: Connection, watchdog: LoopWatchdog, kind: SessionKind) -> None:
    """Until the other end of the connection is closed."""
    if not kind.in_thread:
        obey_parent(kind.memory_mb)
    try:
        kind.load()  # before the first session, so that imports do not count against its time-out
    except AsyncRLHFError as error:
        _sent(connection, StartFailed(str(error)))
        end_worker(1)  # whatever else the import has begun
        return
    if kind.at_once is not None:
        asyncio.run(_Loop(connection, watchdog, kind, kind.at_once).run())
        return
    # A thread that was left behind finds the connection closed, perhaps before it is ready.
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            _, id, what = connection.recv()  # nothing but begins
            began = time.time()
            connection.send(StepResult(id, kind.call(what), began, time.time()))
    end_worker(0)


class _RunningSession:
    """A session on the loop, and when it must end. inbox: what the model has written; None: the session has more, or
    nothing more is wanted.

    is_stuck: a step of it runs on and cannot be stopped. retires: its process should be replaced.
    """

    def __init__(self, id: int, session: Session) -> None:
        self.id, self.session = id, session
        limit_s = session.whole_timeout_s
        self.ends_at = float("inf") if limit_s is None else time.monotonic() + limit_s
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.step: asyncio.Future[Any] | None = None
        self.is_closed = self.is_stuck = self.retires = False

    def close(self) -> None:
        """Nothing more is wanted of it: a step that can be stopped ends now, its cleanup is left to run."""
        self.is_closed = True
        self.inbox.put_nowait(None)
        if self.session.stoppable and self.step is not None:
            self.step.cancel()

    def wake(self, more: Future[None]) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, None)


class _Loop:
    def __init__(self, connection: Connection, watchdog: LoopWatchdog, kind: SessionKind, at_once: int) -> None:
        self._connection, self._watchdog, self._kind = connection, watchdog, kind
        self._places = asyncio.Semaphore(at_once)
        self._running: dict[int, _RunningSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._watchdog.beat()
        if not _sent(self._connection, None):
            end_worker(0)
            return
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._take, self._connection.recv())
            end_worker(0)
            loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="messages", daemon=True).start()
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), PULSE_S)
            self._watchdog.beat()

    def _take(self, order: Order) -> None:
        act, id, what = order
        if act == "begin":  # at once, because an order to close it may come before its task runs
            running = self._running[id] = _RunningSession(id, self._kind.begin(id, what, self._watchdog))
            task = asyncio.get_running_loop().create_task(self._attend(running))
            self._tasks.add(task)
            task.add_done_callback(self._done)
        elif (known := self._running.get(id)) is None or known.is_closed:
            return
        elif act == "close":
            known.close()
        else:
            known.inbox.put_nowait(what)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Of the connection where a thread was left behind; else a defect of ours: the session would never be answered.
            if not isinstance(error, OSError):
                traceback.print_exception(error)
            end_worker(1)

    async def _attend(self, running: _RunningSession) -> None:
        """One session, from its first step to the end of its cleanup."""
        id, sent = running.id, None
        while not running.is_closed:
            step = await self._step(running, sent)
            if step.after == "over":
                del self._running[id]
            if step.result is not NOTHING:
                self._connection.send(step)  # the owner always reads, so this does not block the loop
            if step.after == "over":
                return
            if step.after == "closing" or running.is_closed:
                break
            if (more := running.session.more) is not None:
                more.add_done_callback(running.wake)
            sent = await running.inbox.get()
        running.is_closed = True
        failure = await self._close(running) if self._kind.cleans_up and not running.is_stuck else ""
        del self._running[id]
        self._connection.send(Closed(id, failure, running.is_stuck or running.retires))

    async def _step(self, running: _RunningSession, sent: Any) -> StepResult:
        session, result = running.session, None
        await self._places.acquire()
        began, left_s = time.time(), running.ends_at - time.monotonic()
        try:
            if left_s > 0 and not running.is_closed:
                result = await self._bounded(running, session.step(sent), min(left_s, session.timeout_s))
            else:
                self._places.release()
        except MemoryError:
            # What each session holds cannot be told apart: memory comes back with a new process.
            running.retires = True
            reason = ended(OUT_OF_MEMORY, self._kind.memory_mb, self._kind.memory_setting)
            result = Failure(FailureKind.DIED, reason)
        if result is None:
            result = self._late(session, in_step=left_s > session.timeout_s)
        ends = isinstance(result, Failure) or session.ends(result)
        after: After = "waiting" if not ends else "closing" if self._kind.cleans_up else "over"
        return StepResult(running.id, result, began, time.time(), after, running.is_stuck or running.retires)

    def _late(self, session: Session, in_step: bool = True) -> Failure:
        if in_step:
            return late(session.timeout_s, self._kind.timeout_setting)
        return timed_out(f"the episode took longer than {session.whole_timeout_s:g} s (episode_timeout_s)")

    async def _close(self, running: _RunningSession) -> str:
        """Run the cleanup; what that failed with."""
        await self._places.acquire()
        failure = await self._bounded(running, running.session.close(), running.session.timeout_s)
        return self._late(running.session).reason if failure is None else str(failure)

    async def _bounded(self, running: _RunningSession, step: asyncio.Future[Any], timeout_s: float) -> Any:
        """The result, None where there was none in time. The place is given back unless what runs cannot be stopped."""
        running.step = step
        in_time = is_over = await _is_over(step, timeout_s)
        if not in_time and running.session.stoppable:
            step.cancel()
            is_over = await _is_over(step, GRACE_S)
        running.step, running.is_stuck = None, not is_over
        if is_over:
            self._places.release()
        return step.result() if in_time and not step.cancelled() else None


async def _is_over(step: asyncio.Future[Any], timeout_s: float) -> bool:
    """As `asyncio.wait` for one, at a third of its cost."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    timer = loop.call_later(timeout_s, _set, ended)
    step.add_done_callback(partial(_set, ended))
    await ended
    timer.cancel()
    return step.done()


def _set(ended: asyncio.Future[None], *_: object) -> None:
    if not ended.done():
        ended.set_result(None)
