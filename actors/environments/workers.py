"""The processes that run episodes, and the thread of the actor that looks after them.

owns        `config.workers` processes, those that are retired and not yet drained, the book of their episodes
waits for   messages of the processes, calls of the pool, the next look at processes that have episodes
woken by    these
on close    generators have half of the deadline for their cleanup, then all processes are killed

A process is replaced when it dies, when its loop no longer turns, and when a step that cannot be stopped has exceeded its time.
In the last case it is retired: its other episodes go on for `DRAIN_S` at most while a new process takes its place.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from async_rlhf.actors.environments.book import EpisodeBook
from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.messages import (
    BeginEpisode,
    CloseEpisode,
    EpisodeClosed,
    EpisodeEnded,
    Message,
    Observed,
    Reply,
    StartFailed,
    WorkerReady,
)
from async_rlhf.actors.environments.process import LOOK_S, EpisodeProcess
from async_rlhf.actors.environments.worker import GRACE_S, Limits
from async_rlhf.actors.environments.yields import Kind
from async_rlhf.actors.scoring.executor import MAX_FAILED_STARTS, START_LIMIT_S
from async_rlhf.buffers.errors import DeadlineError, EpisodeError, WireError
from async_rlhf.buffers.transport.frames import Waker

logger = logging.getLogger(__name__)

# Longest time that the other episodes of a retired process have to end.
DRAIN_S = 60.0
_LONGEST_WAIT_S = 60.0

Heard = Callable[[int, Observed | EpisodeEnded | EpisodeClosed | None], None]
"""Takes what became of an episode, by its id; None: it is lost. EpisodeClosed: its cleanup failed. Called from the thread."""


class EpisodeWorkers:
    """See the module docstring. Its methods return at once; `heard` is called once for each `begin` and `reply`, and with None
    for an episode that is lost while the model writes."""

    def __init__(self, spec: EnvironmentSpec, config: EnvironmentConfig, heard: Heard) -> None:
        self._spec, self._num_workers, self._heard = spec, config.workers, heard
        self._limits = Limits(config.max_concurrency, config.max_observation_bytes, config.worker_memory_mb)
        self._book = EpisodeBook()
        self._processes: dict[int, EpisodeProcess] = {}
        self._retired: dict[int, float] = {}
        self._num_started = self._failed_starts = 0
        self._unplaced: dict[int, tuple[Hashable, BeginEpisode]] = {}
        self._unsent: dict[int, BeginEpisode | Reply] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._is_rung = Waker(), False
        self._closing_by: float | None = None
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()
        # multiprocessing joins its children at interpreter exit; a pool that was not closed must not hang there.
        atexit.register(self._kill)

    def begin(self, id: int, key: Hashable, fields: Mapping[str, Any]) -> None:
        message = BeginEpisode(id=id, fields=self._spec.usable(fields))
        self._call(partial(self._unplaced.__setitem__, id, (key, message)))

    def reply(self, id: int, text: str) -> None:
        # What the model wrote has a UTF-8 form, unless it did not write it.
        self._call(partial(self._reply, Reply(id=id, text=text.encode(errors="replace").decode())))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        """Close these episodes; the keys are not begun again."""
        self._call(partial(self._discard, ids, keys))

    def check(self) -> None:
        """Raises EpisodeError when no process comes up."""
        if self._broken is not None or not self._thread.is_alive():
            raise EpisodeError(self._broken or "the thread of episodes has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if something is left after `deadline_s`. A second call does nothing."""
        if self._closing_by is not None:
            return
        self._closing_by = time.monotonic() + deadline_s / 2
        self._waker.ring()
        self._thread.join(deadline_s)
        self._kill()
        atexit.unregister(self._kill)
        if self._thread.is_alive():
            raise DeadlineError(f"the processes of episodes did not end within {deadline_s:g} s")
        self._waker.close()

    def _kill(self) -> None:
        for process in tuple(self._processes.values()):
            process.kill()

    def _call(self, act: Callable[[], None]) -> None:
        self._inbox.put(act)
        if not self._is_rung:  # else the thread has not looked into its inbox since
            self._is_rung = True
            self._waker.ring()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing_by is None and self._broken is None:
                self._start_missing()
                self._turn()
            self._close_all()
        finally:
            for process in self._processes.values():
                process.end()
            self._heard(-1, None)  # Wakes the owner, whose `check` raises if this was not on purpose.

    def _turn(self) -> None:
        """Wait for something, and see to all of it."""
        by_connection = {process.connection: worker for worker, process in self._processes.items()}
        ready = wait([*by_connection, self._waker.descriptor], self._patience_s())
        if self._waker.descriptor in ready:
            self._waker.clear()
            self._is_rung = False
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()
        for connection, worker in by_connection.items():
            if connection in ready and worker in self._processes:
                self._receive(worker)
        for worker in tuple(self._processes):
            self._look(worker)
        self._place()
        self._step()

    def _patience_s(self) -> float:
        if self._closing_by is not None:
            return max(0.0, min(LOOK_S, self._closing_by - time.monotonic()))
        return LOOK_S if any(self._needs_look(worker) for worker in self._processes) else _LONGEST_WAIT_S

    def _needs_look(self, worker: int) -> bool:
        return not self._processes[worker].is_ready or worker in self._retired or self._book.num_busy(worker) > 0

    def _start_missing(self) -> None:
        while len(self._processes) - len(self._retired) < self._num_workers:
            self._num_started += 1
            try:
                self._processes[self._num_started] = EpisodeProcess(self._spec, self._limits)
            except OSError as error:
                self._broken = f"no process for the episodes of environment {self._spec.name!r} could be started: {error}"
                return

    def _place(self) -> None:
        for id, (key, message) in tuple(self._unplaced.items()):
            if self._book.place(id, key) is None:
                return
            del self._unplaced[id]
            self._unsent[id] = message

    def _reply(self, message: Reply) -> None:
        if self._book.phase(message.id) == "waiting":  # Else it has just been lost.
            self._unsent[message.id] = message

    def _step(self) -> None:
        """Send what may be sent: begin episodes, and go on with them."""
        for id, message in tuple(self._unsent.items()):
            worker = self._book.worker_of(id)
            if worker is None:  # It has been lost, while another's message was sent.
                self._unsent.pop(id, None)
            elif self._book.step(id):
                del self._unsent[id]
                self._send(worker, message)

    def _discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._book.forget(keys)
        for id in ids:
            self._unplaced.pop(id, None)
            worker = self._book.worker_of(id)
            if isinstance(self._unsent.pop(id, None), BeginEpisode):
                self._book.closed(id)
            elif worker is not None and self._book.phase(id) != "closing":
                self._book.enter(id, "closing")
                self._send(worker, CloseEpisode(id=id))

    def _send(self, worker: int, message: Message) -> None:
        process = self._processes[worker]
        try:
            process.send(message)
        except WireError as error:  # of an episode that is to begin
            assert isinstance(message, BeginEpisode)
            self._book.closed(message.id)
            self._heard(message.id, _failed(message.id, "not readable", str(error)))
        except BlockingIOError:
            self._fell(worker, f"its process took no message for {GRACE_S:g} s", _known(process.running()))
        except OSError:
            pass  # It has ended, as its connection will show.

    def _receive(self, worker: int) -> None:
        """One message; the next turn shows whether there are more, and looking for them here would cost as much."""
        process = self._processes[worker]
        try:
            self._take(worker, process.receive())
        except (EOFError, OSError, WireError) as error:
            reason = str(error) if isinstance(error, WireError) else process.ended()
            self._fell(worker, reason, _known(process.running()))
            return
        if worker in self._retired and self._book.has_drained(worker):
            self._fell(worker, "it was retired", ())

    def _take(self, worker: int, message: Message) -> None:
        if isinstance(message, WorkerReady):
            self._processes[worker].is_ready = True
            self._failed_starts = 0
            self._book.open(worker)
        elif isinstance(message, StartFailed):
            self._processes[worker].failure = message.reason
        elif isinstance(message, Observed | EpisodeEnded):
            if self._book.phase(message.id) == "stepping":  # Else it has been discarded.
                is_lost = isinstance(message, EpisodeEnded) and message.kind == "lost" and self._book.loses(message.id)
                self._book.enter(message.id, "waiting" if isinstance(message, Observed) else "closing")
                self._heard(message.id, None if is_lost else message)
        elif isinstance(message, EpisodeClosed):
            self._book.closed(message.id)
            if message.failure:
                self._heard(message.id, message)
        if isinstance(message, EpisodeEnded | EpisodeClosed) and message.retire:
            self._retire(worker)

    def _retire(self, worker: int) -> None:
        if worker in self._retired:
            return
        logger.warning("a process of environment %r is replaced: a step in it cannot be stopped", self._spec.name)
        self._book.retire(worker)
        self._retired[worker] = time.monotonic() + DRAIN_S
        if len(self._retired) > self._num_workers:  # So there are never more than twice as many processes.
            self._fell(next(iter(self._retired)), "it was retired, and another after it", ())

    def _look(self, worker: int) -> None:
        """Replace a process that does not get ready, no longer turns, or has not drained in time."""
        process = self._processes.get(worker)
        if process is None:
            return
        now = time.monotonic()
        if not process.is_ready:
            if now >= process.ready_by:
                self._fell(worker, f"was not ready within {START_LIMIT_S:g} s", ())
        elif self._retired.get(worker, now) < now:
            self._fell(worker, f"it was retired and has not drained within {DRAIN_S:g} s", ())
        elif self._book.num_busy(worker) and (blocked := process.blocked()) is not None:
            reason, cause = blocked
            # Of a retired process the cause is known: it has failed already.
            self._fell(worker, reason, () if worker in self._retired else _known(cause))

    def _fell(self, worker: int, reason: str, causes: Collection[int] | None) -> None:
        """End a process and tell what becomes of its episodes. causes: as `EpisodeBook.died`."""
        process = self._processes.pop(worker)
        process.end()
        was_retired = self._retired.pop(worker, None) is not None
        if not process.is_ready:
            self._count_failed_start(reason)
        fallen = self._book.died(worker, causes)
        if not was_retired:
            counts = (len(fallen.failed), len(fallen.lost))
            logger.warning("%s; the process is replaced, %d episodes failed, %d begin again", reason, *counts)
        twice = "its process ended twice while it was in a step: " if causes is None else ""
        kind: Kind = "timed out" if reason.startswith("timed out") else "died"
        for id in fallen.failed:
            self._heard(id, _failed(id, kind, twice + reason))
        for id in fallen.lost:
            self._heard(id, None)

    def _count_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._broken = (
                f"the processes of environment {self._spec.name!r} ({self._spec.target}) ended {self._failed_starts} times in "
                f"a row before they were ready: {reason}; try the import in a fresh interpreter"
            )

    def _close_all(self) -> None:
        """Give the generators time for their cleanup."""
        if self._closing_by is None:
            return
        self._unplaced.clear()
        for worker in tuple(self._processes):
            self._discard(self._book.episodes(worker), ())
        while any(map(self._book.num_busy, self._processes)) and time.monotonic() < self._closing_by:
            self._turn()


def _known(cause: int | None) -> tuple[int] | None:
    return None if cause is None else (cause,)


def _failed(id: int, kind: Kind, reason: str) -> EpisodeEnded:
    now = time.time()
    return EpisodeEnded(
        id=id,
        reason="failed",
        kind=kind,
        scored=True,
        value=None,
        failure=reason,
        metrics={},
        traceback="",
        began=now,
        ended=now,
    )
