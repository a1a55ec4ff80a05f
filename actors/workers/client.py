"""The client of what is served: sessions at one server, calls of rewards and episodes alike.

owns        a DEALER socket and a thread; the open sessions, each with the step that is not answered yet
waits for   messages of the server, actions of its owner; sends a beat once a second
woken by    the socket, and by `do` through a pipe
on close    the server gets the order to close the sessions, and closes what a silent client has left

A server that began anew, or that has dropped this client, names what is missing: first steps are sent again and counted
(`num_resent`), a session that had gone further is lost, once for each key. Steps that a server leaves unanswered fail at their
own limit, and all of them when it has been silent for two minutes.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from async_rlhf.actors.workers import CALLER, CALLER_VARIABLE
from async_rlhf.actors.workers.messages import (
    STAGES,
    Describe,
    Description,
    Leave,
    Message,
    MissingSteps,
    SessionBeat,
    SessionGone,
    SessionRefused,
    SessionStep,
    Show,
    Shown,
    Stepped,
    frames_of,
)
from async_rlhf.actors.workers.sessions import Closed, Happened, Lost, StepResult, Stopped
from async_rlhf.buffers.errors import ConfigError, DeadlineError, RewardError, WireError
from async_rlhf.buffers.failures import Failure, FailureKind, timed_out
from async_rlhf.buffers.protocol.message import Codec
from async_rlhf.buffers.transport.frames import Waker, watch_connections
from async_rlhf.buffers.transport.keys import load_peer

_log = logging.getLogger(__name__)
BEAT_S = 1.0
# A server that is not there is not sent a beat each second, which it would find all at once.
_UNANSWERED_BEAT_S = 10.0
# How exact the limit of a step is.
_LOOK_S = 0.2
# The supervisor restarts a dead scorer within 30 s; while its stages load their models it answers beats.
_SILENT_S = 120.0


class RemoteKind(Protocol):
    """A kind of sessions at a server, and how their steps travel. codec: of its messages. timeout_setting: names the limit of a
    step in failures. whole_timeout_s: of a session, None for no limit."""

    codec: Codec[Message]
    timeout_setting: str
    whole_timeout_s: float | None

    def begins(self, id: int, what: Any) -> Iterable[SessionStep | Show | Leave]:
        """The first step of a session, or what is read ahead and has no answer of its own."""

    def goes_on(self, id: int, turn: int, sent: Any) -> SessionStep: ...

    def limit_s(self, step: SessionStep, timeout_s: float) -> float:
        """How long its answer is waited for. timeout_s: of a step."""

    def read(self, step: Stepped) -> Any:
        """The result of a step, as of `sessions.Session.step`; or Failure."""

    def ends(self, result: Any) -> bool:
        """Whether no step follows."""


@dataclass
class _RemoteSession:
    """ends_at, late_at: of the session and of its step, in monotonic seconds. step: that has no answer yet; None: the model
    writes. began: the newest, in seconds since the epoch."""

    key: Hashable
    timeout_s: float
    ends_at: float
    turn: int = 0
    step: SessionStep | None = None
    late_at: float = math.inf
    began: float = 0.0


class RemoteSessions:
    """`Sessions` at a server; see the module docstring. shown: called from its thread with what was read ahead."""

    def __init__(
        self,
        address: str,
        keys: str,
        kind: RemoteKind,
        happened: Happened,
        shown: Callable[[Shown], object] = lambda shown: None,
    ) -> None:
        """keys: a key directory, "" for none. Raises ConfigError for an address or keys that cannot be."""
        self._kind, self._happened, self._shown = kind, happened, shown
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._alarm: tuple[float, Callable[[], object]] | None = None
        self._sessions: dict[int, _RemoteSession] = {}
        self._lost: set[Hashable] = set()
        self.num_resent = 0
        self._context, self._address, self._closing = zmq.Context(), address, False
        own = os.environ.get(CALLER_VARIABLE, "")
        self._is_there = bool(own) or not address.startswith(CALLER)
        try:
            if self._is_there:
                self._socket = dealer(self._context, address.replace(CALLER, f"{own}/", 1), keys, kind.codec)
        except ConfigError:
            self._context.term()
            raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()

    def begin(self, id: int, key: Hashable, what: Any, timeout_s: float) -> None:
        self.do(partial(self._begin, id, key, what, timeout_s))

    def reply(self, id: int, sent: Any) -> None:
        self.do(partial(self._reply, id, sent))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self.do(partial(self._discard, ids, keys))

    def do(self, action: Callable[[], object]) -> None:
        self._actions.put(action)
        self._waker.ring()

    def at(self, when: float, action: Callable[[], object]) -> None:
        self._alarm = when, action

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RewardError(f"the client thread of {self._address} has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        self._closing = True
        self._waker.ring()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the client thread of {self._address} did not end within {deadline_s:g} s")
        self._waker.close()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _begin(self, id: int, key: Hashable, what: Any, timeout_s: float) -> None:
        limit_s = self._kind.whole_timeout_s
        for message in self._kind.begins(id, what):
            if isinstance(message, SessionStep):
                ends_at = math.inf if limit_s is None else time.monotonic() + limit_s
                self._sessions[id] = _RemoteSession(key, timeout_s, ends_at)
                self._step(id, message)
            else:
                with suppress(WireError):  # the step of its session fails with it
                    self._send(message)

    def _reply(self, id: int, sent: Any) -> None:
        if (session := self._sessions.get(id)) is not None:
            session.turn += 1
            self._step(id, self._kind.goes_on(id, session.turn, sent))

    def _step(self, id: int, step: SessionStep) -> None:
        session, now = self._sessions[id], time.monotonic()
        session.step, session.began = step, time.time()
        session.late_at = min(now + self._kind.limit_s(step, session.timeout_s), session.ends_at)
        if not self._is_there:
            reason = f"what answers is in the process that started this run: {self._address}"
            self._fail(id, Failure(FailureKind.LOST, reason))
            return
        try:
            self._send(step)
        except WireError as error:
            self._fail(id, Failure(FailureKind.UNREADABLE, str(error)))

    def _discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._lost.difference_update(keys)
        if known := [id for id in ids if self._sessions.pop(id, None) is not None]:
            self._send(Leave(ids=known))
        for id in known:
            self._happened(Closed(id))

    def _send(self, message: Message) -> None:
        """Raises WireError for what cannot travel."""
        frames = frames_of(message, self._kind.codec)
        with suppress(zmq.Again):  # its keys were refused, and ZeroMQ has no connection any more
            if self._is_there:
                self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.descriptor, zmq.POLLIN)
        if self._is_there:
            poller.register(self._socket, zmq.POLLIN)
        self._last_message, self._beaten, self._heard_beat, looked = time.monotonic(), 0.0, True, 0.0
        try:
            while not self._closing:
                until = _LOOK_S if self._alarm is None else min(_LOOK_S, self._alarm[0] - time.monotonic())
                if self._waker.descriptor in dict(poller.poll(max(0, math.ceil(1000 * until)))):
                    self._waker.clear()
                for _ in range(self._actions.qsize()):
                    self._actions.get_nowait()()
                if self._is_there:
                    self._receive()
                now = time.monotonic()
                if self._alarm is not None and self._alarm[0] <= now:
                    (_, action), self._alarm = self._alarm, None
                    action()
                if now - looked >= _LOOK_S:
                    looked = now
                    self._look(now)
            self._send(Leave(ids=list(self._sessions)))
        finally:
            self._context.destroy(linger=0)
            self._happened(Stopped())

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                try:
                    message = self._kind.codec.unpack(self._socket.recv(zmq.NOBLOCK))
                except WireError as error:
                    _log.warning("%s: %s", self._address, error)
                    continue
                self._last_message = time.monotonic()
                if isinstance(message, Stepped):
                    self._stepped(message)
                elif isinstance(message, Shown):
                    self._shown(message)
                elif isinstance(message, MissingSteps):
                    self._heard_beat = True
                    self._send_again(message.ids)
                elif isinstance(message, SessionGone):
                    self._lose(message.id, "its server began anew, or lost the process that ran it")
                elif isinstance(message, SessionRefused):
                    self._fail(message.id, Failure(FailureKind.REFUSED, message.reason))

    def _stepped(self, message: Stepped) -> None:
        session = self._sessions.get(message.id)
        if session is None or session.step is None or session.step.turn != message.turn:
            return  # it came already
        session.step, session.late_at = None, math.inf
        result = self._kind.read(message)
        if is_over := self._kind.ends(result):
            del self._sessions[message.id]
            if message.content is not None:  # the server would go on
                self._send(Leave(ids=[message.id]))
        self._happened(StepResult(message.id, result, session.began, time.time(), "over" if is_over else "waiting"))

    def _send_again(self, ids: list[int]) -> None:
        known = [id for id in ids if id in self._sessions]
        if known:
            _log.warning("%s does not know %d sessions of this process (any more)", self._address, len(known))
        for id in known:
            if (step := self._sessions[id].step) is None:
                self._lose(id, "its server began anew")
            else:
                self.num_resent += 1
                self._send(step)

    def _look(self, now: float) -> None:
        if self._is_there and now - self._beaten >= (BEAT_S if self._heard_beat else _UNANSWERED_BEAT_S):
            if not self._heard_beat:
                _log.warning("%s has not answered for %.0f s", self._address, now - self._beaten)
            self._beaten, self._heard_beat = now, False
            steps = [(id, session.step) for id, session in self._sessions.items()]
            self._send(SessionBeat(open=[(id, -1 if step is None else step.turn) for id, step in steps]))
        for id in [id for id, session in self._sessions.items() if session.late_at <= now]:
            self._send(Leave(ids=[id]))
            self._fail(id, self._late(self._sessions[id], now))
        if all(session.step is None for session in self._sessions.values()):
            self._last_message = now  # its silence counts from the next step
        if (silent_s := now - self._last_message) > _SILENT_S:
            for id in [id for id, session in self._sessions.items() if session.step is not None]:
                reason = f"{self._address} was silent for {silent_s:.0f} s"
                self._fail(id, Failure(FailureKind.LOST, reason))

    def _late(self, session: _RemoteSession, now: float) -> Failure:
        if session.ends_at <= now:
            return timed_out(f"the episode took longer than {self._kind.whole_timeout_s:g} s (episode_timeout_s)")
        setting = self._kind.timeout_setting
        return timed_out(f"{self._address} did not answer in time: {session.timeout_s:g} s ({setting})")

    def _lose(self, id: int, reason: str) -> None:
        """The server does not know it: its owner may begin it again, once."""
        session = self._sessions.get(id)
        if session is None or session.key in self._lost:
            self._fail(id, Failure(FailureKind.LOST, reason))
        else:
            self._lost.add(session.key)
            del self._sessions[id]
            self._happened(Lost(id))

    def _fail(self, id: int, why: Failure) -> None:
        if (session := self._sessions.pop(id, None)) is not None:
            self._happened(StepResult(id, why, session.began, time.time()))


def describe(address: str, timeout_s: float, keys: str = "", codec: Codec[Message] = STAGES) -> Description:
    """A server's description. Raises DeadlineError without an answer, WireError for one of another kind, ConfigError as
    `dealer`."""
    with zmq.Context() as context, dealer(context, address, keys, codec) as socket:
        socket.send_multipart(frames_of(Describe(), codec))
        if not socket.poll(int(timeout_s * 1000)):
            raise DeadlineError(f"{address} did not answer within {timeout_s:g} s")
        message = codec.unpack(socket.recv())
        if not isinstance(message, Description):
            raise WireError(f"{address} answers with a {message.type}")
        return message


def dealer(context: zmq.Context[Any], address: str, keys: str, codec: Codec[Any]) -> zmq.Socket[bytes]:
    """Connected as a key directory allows ("": without keys). Raises ConfigError for an address or keys that cannot be."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.max_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)  # an owner must not wait; what is queued is bounded by what the engine decodes
    watch_connections(socket)
    # The name by which the server knows these sessions, also over the next connection.
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
    try:
        if keys:
            load_peer(Path(keys)).apply(socket)
        socket.connect(address)
    except (zmq.ZMQError, ConfigError) as error:
        socket.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{address!r} is no address ({error}); use tcp://HOST:PORT") from error
    return socket
