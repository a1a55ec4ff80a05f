"""The client of what is served: the sessions of one process at one server.

owns        a DEALER socket and a thread; the open sessions, each with the step that is not answered yet
waits for   messages of the server, actions of its owner; sends a beat once a second
woken by    the socket, and by `do` through a pipe
on close    nothing is waited for; the server closes what a silent client has left

A server that began anew, or that has dropped this client, names what is missing: first steps are sent again and counted
(`num_resent`), a session that had gone further is lost. Steps that a server leaves unanswered fail at their own limit, and all
of them when it has been silent for two minutes.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from async_rlhf.buffers.errors import ConfigError, DeadlineError, RewardError, WireError
from async_rlhf.buffers.protocol.message import Codec
from async_rlhf.buffers.transport.frames import Waker
from async_rlhf.buffers.transport.keys import load_peer

_log = logging.getLogger(__name__)
BEAT_S = 1.0
# A server that is not there is not sent a beat each second, which it would find all at once.
_UNANSWERED_BEAT_S = 10.0
# How exact the limit of a step is.
_LOOK_S = 0.2
# The supervisor restarts a dead scorer within 30 s; while its stages load their models it answers beats.
_SILENT_S = 120.0


class Failure(NamedTuple):
    """Why a step has no answer. lost: the server knows no such session; late: the limit of the step is over."""

    kind: Literal["refused", "lost", "late", "silent"]
    reason: str


class SessionClient:
    """See the module docstring.

    came: called from its thread for each step, with the session's number and what came of it. shown: with what was read ahead.
    """

    def __init__(
        self,
        address: str,
        keys: str,
        codec: Codec[Message],
        came: Callable[[int, Stepped | Failure], object],
        shown: Callable[[Shown], object] = lambda shown: None,
    ) -> None:
        """keys: a key directory, "" for none. Raises ConfigError for an address or keys that cannot be."""
        self._codec, self._came, self._shown = codec, came, shown
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._open: dict[int, SessionStep | None] = {}
        self._limits: dict[int, float] = {}
        self.num_resent = 0
        self._context, self._address, self._closing = zmq.Context(), address, False
        own = os.environ.get(CALLER_VARIABLE, "")
        self._is_there = bool(own) or not address.startswith(CALLER)
        try:
            if self._is_there:
                self._socket = dealer(self._context, address.replace(CALLER, f"{own}/", 1), keys, codec)
        except ConfigError:
            self._context.term()
            raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        """In its thread, in the order of these calls."""
        self._actions.put(action)
        self._waker.ring()

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

    def step(self, step: SessionStep, limit_s: float = float("inf")) -> None:
        """Begin a session, or go on with it. limit_s: how long its answer is waited for."""
        if not self._is_there:
            self._fail(step.id, Failure("refused", f"what answers is in the process that started this run: {self._address}"))
            return
        self._open[step.id] = step
        if limit_s < float("inf"):
            self._limits[step.id] = time.monotonic() + limit_s
        try:
            self.send(step)
        except WireError as error:
            self._fail(step.id, Failure("refused", str(error)))

    def leave(self, ids: Iterable[int], streams: Iterable[int] = ()) -> None:
        """Nothing more is wanted of these, and nothing comes."""
        ids = list(ids)
        for id in ids:
            self._forget(id)
        self.send(Leave(ids=ids, streams=list(streams)))

    def show(self, message: Show) -> None:
        """What cannot travel is not shown: the step of its session fails with it."""
        with suppress(WireError):
            self.send(message)

    def send(self, message: Message) -> None:
        """Raises WireError for what cannot travel."""
        frames = frames_of(message, self._codec)
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
                if self._waker.descriptor in dict(poller.poll(int(1000 * _LOOK_S))):
                    self._waker.clear()
                for _ in range(self._actions.qsize()):
                    self._actions.get_nowait()()
                if self._is_there:
                    self._receive()
                now = time.monotonic()
                if now - looked >= _LOOK_S:
                    looked = now
                    self._look(now)
        finally:
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                try:
                    message = self._codec.unpack(self._socket.recv(zmq.NOBLOCK))
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
                    self._fail(message.id, Failure("lost", "its server began anew, or lost the process that ran it"))
                elif isinstance(message, SessionRefused):
                    self._fail(message.id, Failure("refused", message.reason))

    def _stepped(self, message: Stepped) -> None:
        awaited = self._open.get(message.id)
        if awaited is None or awaited.turn != message.turn:
            return  # it came already
        self._limits.pop(message.id, None)
        if message.content is None:
            del self._open[message.id]
        else:
            self._open[message.id] = None
        self._came(message.id, message)

    def _send_again(self, ids: list[int]) -> None:
        known = [id for id in ids if id in self._open]
        if known:
            _log.warning("%s does not know %d sessions of this process (any more)", self._address, len(known))
        for id in known:
            if (step := self._open[id]) is None:
                self._fail(id, Failure("lost", "its server began anew"))
            else:
                self.num_resent += 1
                self.send(step)

    def _look(self, now: float) -> None:
        if self._is_there and now - self._beaten >= (BEAT_S if self._heard_beat else _UNANSWERED_BEAT_S):
            if not self._heard_beat:
                _log.warning("%s has not answered for %.0f s", self._address, now - self._beaten)
            self._beaten, self._heard_beat = now, False
            self.send(SessionBeat(open=[(id, -1 if step is None else step.turn) for id, step in self._open.items()]))
        for id in [id for id, limit in self._limits.items() if limit <= now]:
            self.send(Leave(ids=[id]))
            self._fail(id, Failure("late", f"{self._address} did not answer in time"))
        if all(step is None for step in self._open.values()):
            self._last_message = now  # its silence counts from the next step
        if (silent_s := now - self._last_message) > _SILENT_S:
            for id in [id for id, step in self._open.items() if step is not None]:
                self._fail(id, Failure("silent", f"{self._address} was silent for {silent_s:.0f} s"))

    def _fail(self, id: int, failure: Failure) -> None:
        if id in self._open or not self._is_there:
            self._forget(id)
            self._came(id, failure)

    def _forget(self, id: int) -> None:
        self._open.pop(id, None)
        self._limits.pop(id, None)


def describe(address: str, timeout_s: float, keys: str = "", codec: Codec[Message] = STAGES) -> Description:
    """What a server serves. Raises DeadlineError without an answer, WireError for one of another kind, ConfigError as
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
