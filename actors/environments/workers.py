"""The processes that run episodes, and what becomes of episodes when one of them ends.

A process is replaced when it dies, when its loop no longer turns, and when a step that cannot be stopped has exceeded its time.
In the last case it is retired: its other episodes go on for `DRAIN_S` at most while a new process takes its place. On close
generators have half of the deadline for their cleanup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.settings import EnvironmentFunction
from async_rlhf.actors.environments.worker import (
    BeginEpisode,
    CloseEpisode,
    EpisodeClosed,
    EpisodeStep,
    Message,
    Reply,
    StartFailed,
    serve,
)
from async_rlhf.actors.environments.yields import Kind, Read, fails, raised
from async_rlhf.actors.workers.pool import LONGEST_WAIT_S, LOOK_S, Worker, WorkerPool
from async_rlhf.actors.workers.watchdog import GRACE_S
from async_rlhf.buffers.errors import EpisodeError

logger = logging.getLogger(__name__)

# Longest time that the other episodes of a retired process have to end.
DRAIN_S = 60.0

Happened = Callable[[int, EpisodeStep | EpisodeClosed | None], None]
"""Takes what became of an episode, by its id; None: it is lost. EpisodeClosed: its cleanup failed. Called from the thread."""


Phase = Literal["stepping", "waiting", "closing"]


class Ended(NamedTuple):
    """Ids of the episodes that a dead process leaves behind."""

    failed: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass
class _Slot:
    takes: bool = True
    phases: dict[int, Phase] = field(default_factory=dict)


class EpisodeBook:
    """Which process runs which episode, and what becomes of them when one ends. Pure: a few sets and their rules.

    An episode is `waiting` until it may step and while the model writes, `stepping` until the step is answered, and `closing`
    once it has ended until its cleanup is done. When its process dies:

        closing                                           is over
        waiting                                           is lost, and begun again: it cannot be the cause
        stepping, another or none of them is the cause    is lost
        stepping, it is the cause                         has failed
        stepping, the cause is not known                  is suspect: lost the first time, failed the second

    Of the suspects in a process one steps at a time, so that the second crash identifies one and not all that happened to be
    there. A process that is retired takes no new episodes; it has drained when none is left in it.

    Episodes are named by id, processes by number. A key names what is begun again as another episode.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._worker_of: dict[int, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._suspects: set[Hashable] = set()

    def open(self, worker: int) -> None:
        """This process can run episodes."""
        self._slots[worker] = _Slot()

    def place(self, id: int, key: Hashable) -> int | None:
        """The process that the episode is to begin in: the one with the fewest; None while none takes episodes."""
        taking = [worker for worker, slot in self._slots.items() if slot.takes]
        if not taking:
            return None
        worker = min(taking, key=lambda each: len(self._slots[each].phases))
        self._slots[worker].phases[id] = "waiting"
        self._worker_of[id], self._keys[id] = worker, key
        return worker

    def worker_of(self, id: int) -> int | None:
        return self._worker_of.get(id)

    def step(self, id: int) -> bool:
        """Whether the episode may step now; it then does."""
        phases = self._slots[self._worker_of[id]].phases
        if self._keys[id] in self._suspects:
            stepping = (self._keys[other] for other, phase in phases.items() if phase == "stepping")
            if any(key in self._suspects for key in stepping):
                return False
        phases[id] = "stepping"
        return True

    def enter(self, id: int, phase: Literal["waiting", "closing"]) -> None:
        """An ended episode is closing, and no longer suspect."""
        self._slots[self._worker_of[id]].phases[id] = phase
        if phase == "closing":
            self._suspects.discard(self._keys[id])

    def phase(self, id: int) -> Phase | None:
        worker = self._worker_of.get(id)
        return None if worker is None else self._slots[worker].phases[id]

    def closed(self, id: int) -> None:
        """Nothing of it is left."""
        self._keys.pop(id, None)
        if (worker := self._worker_of.pop(id, None)) is not None:
            del self._slots[worker].phases[id]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """These are not begun again."""
        self._suspects -= frozenset(keys)

    def retire(self, worker: int) -> None:
        self._slots[worker].takes = False

    def has_drained(self, worker: int) -> bool:
        slot = self._slots[worker]
        return not slot.takes and not slot.phases

    def num_busy(self, worker: int) -> int:
        """Episodes in the process, those that are being cleaned up included."""
        return len(self.episodes(worker))

    def episodes(self, worker: int) -> tuple[int, ...]:
        """The ids of those in the process."""
        return tuple(self._slots[worker].phases) if worker in self._slots else ()

    def died(self, worker: int, causes: Collection[int] | None) -> Ended:
        """causes: the episodes that ended the process; None: not known. Of a process that was never open: nothing."""
        slot = self._slots.pop(worker, _Slot())
        failed: list[int] = []
        lost: list[int] = []
        for id, phase in slot.phases.items():
            key = self._keys.pop(id)
            del self._worker_of[id]
            if phase == "closing":
                continue
            is_cause = phase == "stepping" and (key in self._suspects if causes is None else id in causes)
            (failed if is_cause else lost).append(id)
            if is_cause:
                self._suspects.discard(key)
            elif phase == "stepping" and causes is None:
                self._suspects.add(key)
        return Ended(tuple(failed), tuple(lost))


class _EpisodeWorker(Worker):
    """retired_until: monotonic seconds, None while it takes episodes."""

    memory_setting = "environment.worker_memory_mb"

    def __init__(
        self, number: int, spec: EnvironmentSpec, config: EnvironmentConfig, function: EnvironmentFunction | None
    ) -> None:
        self._timeout_s = spec.timeout_s
        super().__init__(number, serve, (spec, config, function), config.worker_memory_mb, in_thread=function is not None)
        self.retired_until: float | None = None
        self._seen, self._looked, self._silent_s = 0.0, time.monotonic(), 0.0

    def blocked(self, now: float) -> tuple[str, int | None] | None:
        """Once its loop has not turned for longer than a step may take: why, and the episode whose step blocks it if known.

        Only time in which this process could look itself counts as silence.
        """
        beat = self.watchdog.beaten
        self._silent_s = self._silent_s + min(now - self._looked, 2 * LOOK_S) if beat == self._seen else 0.0
        self._seen, self._looked = beat, now
        if self._silent_s <= self._timeout_s + GRACE_S:
            return None
        limit = f"for more than {self._timeout_s:g} s (timeout_s)"
        if (cause := self.running()) is None:
            return f"its process did not answer {limit}", None
        return f"timed out: it blocked the event loop {limit}; a step that does not await belongs in a plain 'def'", cause


class EpisodeWorkers(WorkerPool[_EpisodeWorker]):
    """See the module docstring. Its methods return at once; `happened` is called once for each `begin` and `reply`, and with
    None for an episode that is lost while the model writes."""

    error = EpisodeError

    def __init__(
        self, spec: EnvironmentSpec, config: EnvironmentConfig, happened: Happened, function: EnvironmentFunction | None
    ) -> None:
        """function: where only this process has it; a thread then stands for each process, and is left behind."""
        self._spec, self._config, self._happened, self._function = spec, config, happened, function
        self._book = EpisodeBook()
        self._unplaced: dict[int, tuple[Hashable, BeginEpisode]] = {}
        self._unsent: dict[int, BeginEpisode | Reply] = {}
        super().__init__(config.workers, f"the processes of environment {spec.name!r} ({spec.target})")

    def begin(self, id: int, key: Hashable, fields: Mapping[str, Any]) -> None:
        message = BeginEpisode(id, self._spec.usable(fields))
        self._act(partial(self._unplaced.__setitem__, id, (key, message)))

    def reply(self, id: int, text: str) -> None:
        self._act(partial(self._reply, Reply(id, text)))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        """Close these episodes; the keys are not begun again."""
        self._act(partial(self._discard, ids, keys))

    def num_episodes(self) -> int:
        """Those in the processes, that are being cleaned up included."""
        return sum(map(self._book.num_busy, self._workers))

    # -- its thread --------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> _EpisodeWorker:
        return _EpisodeWorker(number, self._spec, self._config, self._function)

    def _patience_s(self) -> float:
        busy = any(not worker.takes or self._book.num_busy(number) for number, worker in self._workers.items())
        return LOOK_S if busy else LONGEST_WAIT_S

    def _advance(self) -> None:
        """Begin episodes, and go on with them."""
        for id, (key, message) in tuple(self._unplaced.items()):
            if self._book.place(id, key) is None:
                break
            del self._unplaced[id]
            self._unsent[id] = message
        for id, unsent in tuple(self._unsent.items()):
            worker = self._book.worker_of(id)
            if worker is None:  # It has been lost, while another's message was sent.
                self._unsent.pop(id, None)
            elif self._book.step(id):
                del self._unsent[id]
                self._send(self._workers[worker], unsent)

    def _reply(self, message: Reply) -> None:
        if self._book.phase(message.id) == "waiting":  # Else it has just been lost.
            self._unsent[message.id] = message

    def _discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._book.forget(keys)
        for id in ids:
            self._unplaced.pop(id, None)
            worker = self._book.worker_of(id)
            if isinstance(self._unsent.pop(id, None), BeginEpisode):
                self._book.closed(id)
            elif worker is not None and self._book.phase(id) != "closing":
                self._book.enter(id, "closing")
                self._send(self._workers[worker], CloseEpisode(id))

    def _send(self, worker: _EpisodeWorker, message: Message) -> None:
        self._look_by(time.monotonic() + LOOK_S)
        try:
            worker.connection.send(message)
        except BlockingIOError:
            self._replace(worker, f"its process took no message for {GRACE_S:g} s", worker.running())
        except OSError:
            pass  # It has ended, as its connection will show.
        except Exception as error:  # noqa: BLE001  a column may be an object of the user's, and raise anything
            assert isinstance(message, BeginEpisode)
            self._book.closed(message.id)
            self._happened(message.id, _failed(message.id, "not readable", raised(error).failure))

    def _take(self, worker: _EpisodeWorker) -> None:
        message: Message = worker.connection.recv()
        if message is None:
            self._is_up(worker)
            self._book.open(worker.number)
        elif isinstance(message, StartFailed):
            worker.failure = message.reason
        elif isinstance(message, EpisodeStep):
            if self._book.phase(message.id) == "stepping":  # Else it has been discarded.
                self._book.enter(message.id, "waiting" if isinstance(message.came, Read) else "closing")
                self._happened(message.id, message)
        elif isinstance(message, EpisodeClosed):
            self._book.closed(message.id)
            if message.failure:
                self._happened(message.id, message)
        if isinstance(message, EpisodeStep | EpisodeClosed) and message.retire and worker.takes:
            self._retire(worker)
        if not worker.takes and self._has(worker) and self._book.has_drained(worker.number):
            self._end_retired(worker)

    def _retire(self, worker: _EpisodeWorker) -> None:
        logger.warning("a process of environment %r is replaced: a step in it cannot be stopped", self._spec.name)
        self._book.retire(worker.number)
        worker.takes, worker.retired_until = False, time.monotonic() + DRAIN_S
        retired = [each for each in self._workers.values() if not each.takes]
        if len(retired) > self._num_workers:  # So there are never more than twice as many processes.
            self._end_retired(retired[0])

    def _look(self, worker: _EpisodeWorker, now: float) -> None:
        """Replace a process that no longer turns, or has not drained in time."""
        if worker.retired_until is not None and worker.retired_until < now:
            self._end_retired(worker)
        elif self._book.num_busy(worker.number) and (blocked := worker.blocked(now)) is not None:
            reason, cause = blocked
            if worker.takes:
                self._replace(worker, reason, cause)
            else:
                self._end_retired(worker)

    def _end_retired(self, worker: _EpisodeWorker) -> None:
        """Its cause is known, and has failed already."""
        self._replace(worker, "it was retired", _NONE)

    def _lost(self, worker: _EpisodeWorker, reason: str, cause: int | None) -> None:
        ended = self._book.died(worker.number, None if cause is None else (cause,))
        if worker.takes:
            counts = (len(ended.failed), len(ended.lost))
            logger.warning("%s; the process is replaced, %d episodes failed, %d begin again", reason, *counts)
        twice = "its process ended twice while it was in a step: " if cause is None else ""
        kind: Kind = "timed out" if reason.startswith("timed out") else "died"
        for id in ended.failed:
            self._happened(id, _failed(id, kind, twice + reason))
        for id in ended.lost:
            self._happened(id, None)

    def _drain(self, by: float) -> None:
        """Give the generators time for their cleanup."""
        self._unplaced.clear()
        for number in tuple(self._workers):
            self._discard(self._book.episodes(number), ())
        while self.num_episodes() and (left_s := by - time.monotonic()) > 0:
            self._turn(time.monotonic() + min(LOOK_S, left_s))

    def _ended(self) -> None:
        self._happened(-1, None)  # Wakes the owner, whose `check` raises if this was not on purpose.


_NONE = -1
"""The id of no episode."""


def _failed(id: int, kind: Kind, reason: str) -> EpisodeStep:
    now = time.time()
    return EpisodeStep(id, fails(kind, reason), now, now)
