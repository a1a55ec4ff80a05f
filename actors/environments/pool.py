"""The pool of episodes: what the actor's loop needs of environments.

The loop must never block: `begin`, `reply`, `discard` and `poll` return at once, and `wake` is called from another thread when
a poll may have something. Each `begin` and each `reply` brings one `Event`; one of a lost episode may also come while the model
writes.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from async_rlhf.actors.environments.config import SourceEnvironment
from async_rlhf.actors.environments.loading import EnvironmentSpec, form_of
from async_rlhf.actors.environments.remote import RemoteEpisodes
from async_rlhf.actors.environments.settings import EnvironmentFunction, Reply
from async_rlhf.actors.environments.worker import NO_IMAGES, EpisodeImages, EpisodeKind
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.actors.workers import CALLER
from async_rlhf.actors.workers.client import RemoteSessions
from async_rlhf.actors.workers.pool import WorkerPool
from async_rlhf.actors.workers.sessions import Closed, Lost, Sessions, StepResult, Stopped
from async_rlhf.buffers import failures
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.failures import Failure, FailureKind

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Event(Generic[Key]):
    """The result of a step."""

    key: Key
    result: Read | EpisodeEnd | None
    """The model's next input (the first is the prompt), the end, or None for a lost episode: its process ended for the reason
    of another episode or an unknown one, and the caller begins it again."""
    began: float = 0.0
    """Start of the environment's step, in seconds since the epoch."""
    ended: float = 0.0
    """Its end, likewise."""


@dataclass
class EpisodeCounters:
    """Numbers of episodes, by their fate."""

    episodes: Counter[str] = field(default_factory=Counter)
    """Ended ones, by reason."""
    failed: Counter[FailureKind] = field(default_factory=Counter)
    """Failed ones, by kind."""
    lost: int = 0
    """Those begun again."""
    cleanups_failed: int = 0
    """Generators whose `finally` raised, hung or yielded."""


@dataclass
class _PendingEpisode(Generic[Key]):
    key: Key
    writes: int = 0
    turns: int = 0


class EpisodePool(Generic[Key]):
    """Runs the episodes of one environment; its methods are called from one thread."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: SourceEnvironment,
        wake: Callable[[], None] = lambda: None,
        function: EnvironmentFunction | None = None,
        images: EpisodeImages = NO_IMAGES,
    ) -> None:
        """function: where only this process has it; it then runs in threads. images: those of the run; a server has none."""
        self._spec, self.wake, self._is_awake = spec, wake, False
        self._ids = itertools.count()
        self._id_of: dict[Key, int] = {}
        self._pending: dict[int, _PendingEpisode[Key]] = {}
        self._inbox: queue.SimpleQueue[StepResult | Closed | Lost | Stopped] = queue.SimpleQueue()
        self.counters = EpisodeCounters()
        form, address = form_of(spec.target)
        self._sessions: Sessions
        if form == "remote":
            keys = "" if address.startswith(CALLER) else str(spec.options.get("keys", ""))
            self._sessions = RemoteSessions(address, keys, RemoteEpisodes(spec), self._happened)
        else:
            what = f"the processes of environment {spec.name!r} ({spec.target})"
            kind = EpisodeKind(spec, config, function, images)
            self._sessions = WorkerPool(kind, config.workers, what, EpisodeError, self._happened)

    @property
    def num_pending(self) -> int:
        """Episodes that were begun and have neither ended nor been lost or discarded."""
        return len(self._pending)

    def num_turns(self, key: Key) -> int:
        """Turns that the model may have begun in an episode; 0 where none is pending by this key."""
        pending = self._pending.get(self._id_of.get(key, -1))
        return 0 if pending is None else pending.turns

    def begin(self, key: Key, fields: Mapping[str, Any]) -> None:
        """Begin an episode, or begin a lost one again.

        fields: the columns of its row, `prompt`, and `seed` (int, the same for all members of a group); plain data.
        Raises EpisodeError for a key whose episode runs already.
        """
        if key in self._id_of:
            raise EpisodeError(f"the episode {key} runs already; poll its end or discard it first")
        id = self._id_of[key] = next(self._ids)
        self._pending[id] = _PendingEpisode(key)
        self._sessions.begin(id, key, self._spec.usable(fields), self._spec.timeout_s)

    def reply(self, key: Key, sent: str | Reply) -> None:
        """Sends the model's text of its turn, a Reply after a call. Raises EpisodeError where it is not the model's turn."""
        id = self._id_of.get(key, -1)
        if id not in self._pending or not self._pending[id].writes:
            raise EpisodeError(f"the episode {key} waits for no reply; each observation has one")
        self._pending[id].writes -= 1
        self._sessions.reply(id, sent)

    def poll(self) -> list[Event[Key]]:
        """The events since the last poll; a lost episode has only that event. Never waits.

        Raises EpisodeError when no process can run the environment.
        """
        self._is_awake = False  # first of all, so that nothing comes unseen and without a call of `wake`
        self._sessions.check()
        events: list[Event[Key]] = []
        # Only what is there now: environments that answer faster than this loop must not block the actor.
        for _ in range(self._inbox.qsize()):
            message = self._inbox.get_nowait()
            if isinstance(message, Closed):
                self._count_cleanup(message)
            elif not isinstance(message, Stopped) and message.id in self._pending:  # Else it was discarded.
                events.append(self._event(message))
        lost = {event.key for event in events if event.result is None}
        return [event for event in events if not isinstance(event.result, Read) or event.key not in lost]

    def discard(self, keys: Iterable[Key]) -> None:
        """Close these episodes; unknown keys are ignored. Their generators are closed as soon as their steps end."""
        keys = tuple(keys)
        ids = tuple(id for key in keys if (id := self._id_of.pop(key, None)) is not None)
        for id in ids:
            del self._pending[id]
        self._sessions.discard(ids, keys)

    def close(self, deadline_s: float = 5.0) -> None:
        """End all processes, after half of the deadline for cleanup. Raises DeadlineError if one is left after all of it."""
        self._sessions.close(deadline_s)

    def _happened(self, message: StepResult | Closed | Lost | Stopped) -> None:
        """Called from the thread of the sessions."""
        if isinstance(message, Closed) and not message.failure:
            return
        self._inbox.put(message)
        if not self._is_awake:  # it is awake until the next poll
            self._is_awake = True
            self.wake()

    def _event(self, message: StepResult | Lost) -> Event[Key]:
        pending = self._pending[message.id]
        if isinstance(message, StepResult) and isinstance(message.result, Read):
            pending.writes += 1
            pending.turns += 1
            return Event(pending.key, message.result, message.began, message.ended)
        del self._id_of[pending.key], self._pending[message.id]
        if isinstance(message, Lost):
            self.counters.lost += 1
            return Event(pending.key, None)
        end = EpisodeEnd.of(message.result) if isinstance(message.result, Failure) else message.result
        self._count(end)
        return Event(pending.key, end, message.began, message.ended)

    def _count(self, end: EpisodeEnd) -> None:
        self.counters.episodes[end.reason] += 1
        if end.failure is not None:
            failures.count(self.counters.failed, end.failure, "an episode")

    def _count_cleanup(self, closed: Closed) -> None:
        if not self.counters.cleanups_failed:
            logger.warning("the cleanup of an episode failed, later failures are only counted: %s", closed.failure)
        self.counters.cleanups_failed += 1
