"""Sessions for harnesses that run elsewhere: an episode waits until a harness starts it, drives the model, and ends it.

    actor --- begin, reply ---> Harnesses <--- start, set_reward, end --- a harness
          <-- Call, the end ---           <--- /v1/chat/completions ----- its agent

A session is a credit: it begins in an actor, which the queue's bound has allowed to, and only such a one can be started. So
nothing is sampled that would come too late. The episode's own time begins when a harness starts it: until then it waits, and
after that a harness that is silent for `timeout_s` between two requests has lost it (counted, failed, never 0).

owns        the endpoint; the episodes that wait and those that run, which its thread and the server's share by a lock
waits for   nothing: a request waits for its call's answer, which the end of its session bounds
woken by    `wake`, for what `poll` then has
on close    sessions end (503), and a harness is answered 410
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_rlhf.actors.agents.endpoint import Endpoint
from async_rlhf.actors.agents.request import RequestError
from async_rlhf.actors.agents.sessions import AgentSession, IncomingCall
from async_rlhf.actors.agents.turns import RESPONSE_TEMPLATE, Turns
from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import MAX_TURNS, EnvironmentSpec
from async_rlhf.actors.environments.pool import Event
from async_rlhf.actors.environments.server import ANY_TURNS, EnvironmentServer
from async_rlhf.actors.environments.settings import Reply, Scores
from async_rlhf.actors.environments.tool_calls import TEMPLATE, checked
from async_rlhf.actors.environments.yields import EpisodeEnd, Read, read_yield
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.failures import timed_out
from async_rlhf.buffers.score import Score

WAIT_S = 1.0
"""What a harness waits where no episode does."""
SILENT_S = 240.0
"""What a harness may take between two requests; a group without progress has longer (`queue.progress_timeout_s`)."""


@dataclass(eq=False)
class _StartedEpisode:
    """An episode that a harness has started."""

    key: int
    session: AgentSession
    turns: Turns
    since: float
    """Monotonic seconds of the last request of the harness, or answer to it."""
    began: float
    calls: deque[IncomingCall] = field(default_factory=deque)
    """Calls behind the one that is answered."""
    answering: IncomingCall | None = None
    """The call that the model answers."""
    reward: Any = None
    """The newest that was set."""


class Harnesses:
    """The backend of an environment's server (`EnvironmentServer`), by its keys."""

    def __init__(
        self,
        timeout_s: float,
        template: Mapping[str, Any],
        *,
        port: int = 0,
        harness_key: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """harness_key: with which sessions are started and ended; no agent has it. Raises OSError for a port that is taken."""
        self._timeout_s, self._template, self._clock = timeout_s, template, clock
        self.wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._running: dict[str, _StartedEpisode] = {}
        self._events: queue.SimpleQueue[Event[int]] = queue.SimpleQueue()
        self.counters = Counter({"started": 0, "ended": 0, "timed_out": 0, "given_up": 0})
        actions = {"start_session": self._start, "set_reward": self._set_reward, "end_session": self._end}
        self.endpoint = Endpoint(port, harness_key, actions)
        self.origin = self.endpoint.origin

    # -- the server's side, in its thread ----------------------------------------------------------------------------

    def begin(self, key: int, fields: Mapping[str, Any]) -> None:
        """An episode that a harness may start. fields: the columns of its row, `prompt` and `seed`."""
        with self._lock:
            self._waiting[key] = fields

    def reply(self, key: int, sent: str | Reply) -> None:
        """The model's turn in answer to the call of the last event."""
        with self._lock:
            running = self._of(key)
            if running is None or running.answering is None:
                return  # it ended meanwhile
            assert isinstance(sent, Reply)
            call, running.answering = running.answering, None
            running.since = self._clock()
            call.pending.answer.set_result(running.turns.wrote(sent))
            while running.calls and running.answering is None:
                self._ask(running, running.calls.popleft())

    def poll(self) -> list[Event[int]]:
        """The new events of episodes, with those of episodes that a harness has lost."""
        with self._lock:
            late = [running for running in self._running.values() if self._is_late(running)]
            for running in late:
                self.counters["timed_out"] += 1
                why = timed_out(f"its harness sent nothing for {self._timeout_s:g} s (timeout_s)")
                self._over(running, EpisodeEnd.of(why))
        return [self._events.get_nowait() for _ in range(self._events.qsize())]

    def discard(self, keys: Iterable[int]) -> None:
        """The run has given these up."""
        with self._lock:
            for key in keys:
                if self._waiting.pop(key, None) is None and (running := self._of(key)) is not None:
                    self.counters["given_up"] += 1
                    self._close_session(running)

    def close(self) -> None:
        self.endpoint.close()

    # -- the harness' side, in the endpoint's thread -----------------------------------------------------------------

    def _start(self, body: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """The episode that has waited longest, or how long to wait."""
        with self._lock:
            if not self._waiting:
                return {"wait_s": WAIT_S}
            key = next(iter(self._waiting))
            row = self._waiting.pop(key)
            session, llm = self.endpoint.open(lambda call: self._on_call(session.secret, call))
            llm = replace(llm, origin=origin)
            now = self._clock()
            self._running[session.secret] = _StartedEpisode(key, session, Turns(self._template, session), now, time.time())
            self.counters["started"] += 1
        urls = {"base_url": llm.base_url, "anthropic_url": llm.anthropic_url, "api_key": llm.api_key, "model": llm.model}
        return {"session_id": session.secret, "row": dict(row), "environ": llm.environ, **urls}

    def _set_reward(self, body: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Sets the reward of the episode, the newest of which counts at its end, or that of the call `call_id`, once."""
        with self._lock:
            running = self._named(body)
            running.since = self._clock()
            if "call_id" in body:
                running.turns.reward(body["call_id"], body.get("reward"))
            else:
                running.reward = body.get("reward")
        return {}

    def _end(self, body: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Without a reward the episode has no score, and is not trained on; with a `failure` it has failed for that reason."""
        with self._lock:
            running = self._named(body)
            scores = running.turns.end(body.get("reward", running.reward))
            if failure := body.get("failure"):
                scores = Scores(Score(failure=str(failure)[:1000]))
            end = read_yield(scores, running.turns.num_calls, ANY_TURNS, calls=True)
            assert isinstance(end, EpisodeEnd)
            self.counters["ended"] += 1
            self._over(running, end)
        return {"score": end.score and end.score.value, "failure": end.failure and end.failure.reason}

    def _on_call(self, name: str, call: IncomingCall) -> None:
        with self._lock:
            if (running := self._running.get(name)) is None:
                return  # its session has just ended, and answers it
            if running.answering is None:
                self._ask(running, call)
            else:
                running.calls.append(call)

    # -- both, under the lock ----------------------------------------------------------------------------------------

    def _ask(self, running: _StartedEpisode, call: IncomingCall) -> None:
        """A call whose turn comes, unless its client has gone."""
        if not running.session.begins(call.pending):
            return
        running.answering, running.since = call, self._clock()
        read = read_yield(running.turns.call(call.request), running.turns.num_calls - 1, ANY_TURNS, calls=True)
        if isinstance(read, EpisodeEnd):
            self._over(running, read)
        else:
            self._happened(running, read)

    def _over(self, running: _StartedEpisode, end: EpisodeEnd) -> None:
        self._close_session(running)
        self._happened(running, end)

    def _close_session(self, running: _StartedEpisode) -> None:
        del self._running[running.session.secret]
        self.endpoint.end(running.session)

    def _happened(self, running: _StartedEpisode, result: Read | EpisodeEnd) -> None:
        self._events.put(Event(running.key, result, running.began, time.time()))
        running.began = time.time()
        self.wake()

    def _is_late(self, running: _StartedEpisode) -> bool:
        return running.answering is None and self._clock() - running.since > self._timeout_s

    def _of(self, key: int) -> _StartedEpisode | None:
        return next((running for running in self._running.values() if running.key == key), None)

    def _named(self, body: Mapping[str, Any]) -> _StartedEpisode:
        running = self._running.get(str(body.get("session_id")))
        if running is None:
            raise RequestError("unknown or closed session; its run may have given it up", 410)
        return running


def serve_harnesses(
    address: str, port: int, key_file: Path, key_dir: Path | None, settings: Mapping[str, Any]
) -> tuple[EnvironmentServer, Harnesses]:
    """The server of a run's episodes at `address`, and what harnesses start them at. key_dir: as of `Service`.
    settings: of `[environment]`; `timeout_s` is the harness'. Raises ConfigError."""
    config = EnvironmentConfig.model_validate(settings)
    given = {"max_turns": MAX_TURNS, **config.given, "timeout_s": config.timeout_s or SILENT_S}
    spec = EnvironmentSpec("sessions", "sessions", "async", calls=True, **given)
    template = checked(config.options.get(RESPONSE_TEMPLATE, TEMPLATE))
    try:
        harnesses = Harnesses(spec.timeout_s, template, port=port, harness_key=_key(key_file))
    except OSError as error:
        raise ConfigError(f"sessions cannot be served: {error}") from error
    try:
        return EnvironmentServer(spec, config, address, key_dir, pool=harnesses), harnesses
    except ConfigError:
        harnesses.close()
        raise


def _key(file: Path) -> str:
    """The harnesses' key; a new file is readable by this user alone. Raises OSError, ConfigError for a file without a key."""
    with suppress(FileExistsError), open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
        new.write(secrets.token_urlsafe(32) + "\n")
    key = file.read_text().strip()
    if len(key) < 16:
        raise ConfigError(f"{file} holds no key of at least 16 characters; remove it, and a new one is made")
    return key
