"""The loop of a server that runs users' code: a scorer, a reward server, an environment server.

owns        a ROUTER socket, its clients and their sessions; nothing that a restart must keep
waits for   messages, key exchanges, and what `wake` announces; looks up twice a second
woken by    the socket, and by `wake` from any thread
on close    `_close`, then what is unsent has half a second; clients send again what was not answered

An answer is kept until its client goes on or names the session no longer. A client that is silent is dropped with all of its
sessions, and may come again as another.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import zmq

from async_rlhf.actors.workers.messages import (
    NUM_IDS,
    SERVED,
    STAGES,
    Describe,
    Description,
    EnvironmentFields,
    Leave,
    Message,
    MissingSteps,
    SessionBeat,
    SessionGone,
    SessionRefused,
    SessionStep,
    Show,
    Stepped,
)
from async_rlhf.buffers.errors import ConfigError, RewardError, WireError
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.server import ServerSocket

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_MAX_UNREAD, _MAX_UNSENT = 1000, 1000  # messages of a client, and for it
# Sessions above it wait at their clients, who send them again.
_MAX_SESSIONS = 10_000
SILENT_S = 60.0
# Refused handshakes are logged once in so many seconds.
_REPORT_S = 10.0


@dataclass
class ServedSession:
    """turn: of the newest step. answer: to it, None while it is worked on. stage, stream: of a call, by their names here."""

    turn: int = 0
    answer: Stepped | None = None
    stage: str = ""
    stream: int | None = None


@dataclass
class ServiceClient:
    """peer: its identity. number: `NUM_IDS` times it is added to its ids here. streams: those without a session so far.
    last_seen: monotonic time of its last message."""

    peer: bytes
    number: int
    last_seen: float
    sessions: dict[int, ServedSession] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)

    def key(self, id: int) -> int:
        """The server's id of a session or stream of this client."""
        return self.number * NUM_IDS + id


class WorkerService:
    """See the module docstring. `run` serves until `stop`. counters: of messages, by what became of them."""

    what: ClassVar[str]
    """What is served, for messages."""

    def __init__(
        self,
        address: str,
        key_dir: Path | None,
        *,
        is_private: bool = False,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_private: its clients are the actors of one run on this machine, who decide how much they ask for. silent_s: after
        that a client is gone. Raises ConfigError for an address it may not or cannot have."""
        if key_dir is None and not address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:")):
            raise ConfigError(
                f"address = {address!r}: without keys {self.what} is served on this machine only. Use tcp://127.0.0.1:PORT or "
                "an ipc:// path, or make keys (async-rlhf keys new DIR) and name them with --keys."
            )
        self._codec, self._silent_s, self._clock = STAGES if is_private else SERVED, silent_s, clock
        self._max_sessions = sys.maxsize if is_private else _MAX_SESSIONS
        self._clients: dict[bytes, ServiceClient] = {}
        self._by_number: dict[int, ServiceClient] = {}
        self._num_met, self._stopped = 0, False
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.counters = {"requested": 0, "answered": 0, "refused": 0}
        try:
            self._socket = ServerSocket(
                address,
                None if key_dir is None else keys.load_hub(key_dir),
                max_part_bytes=self._codec.max_bytes,
                max_message_bytes=2 * self._codec.max_bytes,
                max_unread=_MAX_UNREAD,
                max_unsent=0 if is_private else _MAX_UNSENT,
                linger_ms=500,
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"address = {address!r} cannot be used: {error}") from error
        self.address = self._socket.address

    @property
    def num_sessions(self) -> int:
        return sum(len(client.sessions) for client in self._clients.values())

    def run(self) -> None:
        """Serve until `stop`; raises RewardError or EpisodeError when the processes of users' code do not come up."""
        looked = reported = self._clock()
        try:
            while not self._stopped:
                self._socket.wait(_LOOK_S)
                self._receive()
                for _ in range(self._events.qsize()):
                    self._events.get_nowait()()
                self._advance()
                now = self._clock()
                if now - looked > _LOOK_S:
                    looked = now
                    self._drop_silent(now)
                    self._socket.cut_unfinished()
                if now - reported > _REPORT_S:
                    reported = now
                    self._socket.report()
        finally:
            self._close()
            self._socket.close()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        self._stopped = True
        self._socket.wake()

    def _do(self, action: Callable[[], object], *, wakes: bool = True) -> None:
        """In the loop; from any thread."""
        self._events.put(action)
        if wakes:
            self._socket.wake()

    def _wake(self) -> None:
        """From any thread: there may be something to see to."""
        self._do(lambda: None)

    def _receive(self) -> None:
        while (received := self._socket.receive()) is not None:
            peer, *frames = map(bytes, received[0])
            try:
                if len(frames) != 2:
                    raise WireError(f"what is no message: {len(frames)} frames, not 2")
                self._handle(peer, self._codec.unpack(frames[1]))
            except (WireError, RewardError) as error:
                self.counters["refused"] += 1
                _log.warning("refused: %s", error)
                if len(frames) == 2 and frames[0].isdigit() and len(frames[0]) < len(str(NUM_IDS)):
                    self._send(peer, SessionRefused(id=int(frames[0]), reason=str(error)))

    def _handle(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Describe):  # its sender may never ask for more
            waiting = sum(each.answer is None for client in self._clients.values() for each in client.sessions.values())
            answered, environment = self.counters["answered"], self._environment()
            self._send(peer, Description(answered=answered, waiting=waiting, environment=environment))
            return
        client = self._meet(peer)
        if isinstance(message, SessionStep):
            self._step(client, message)
        elif isinstance(message, Show):
            self._show(client, message)
        elif isinstance(message, Leave):
            self._left(client, message.ids, [client.key(stream) for stream in message.streams])
        elif isinstance(message, SessionBeat):
            self._beat(client, dict(message.open))
        else:
            raise WireError(f"what is no message of a client: {message.type}")

    def _meet(self, peer: bytes) -> ServiceClient:
        if peer not in self._clients:
            self._clients[peer] = self._by_number[self._num_met] = ServiceClient(peer, self._num_met, 0.0)
            self._num_met += 1
        self._clients[peer].last_seen = self._clock()
        return self._clients[peer]

    def _step(self, client: ServiceClient, step: SessionStep) -> None:
        session = client.sessions.get(step.id)
        if session is None and step.turn:
            self._send(client.peer, SessionGone(id=step.id))
        elif session is None:
            if self.num_sessions < self._max_sessions:
                session = ServedSession()
                self._begin(client, session, step)
                client.sessions[step.id] = session
                self.counters["requested"] += 1
        elif step.turn == session.turn + 1 and session.answer is not None and session.answer.content is not None:
            self._go_on(client, step)
            session.turn, session.answer = step.turn, None
            self.counters["requested"] += 1
        elif step.turn != session.turn:  # an equal turn is a repetition
            raise WireError(f"turn {step.turn} of a session whose turn is {session.turn}")
        elif session.answer is not None:
            self._send(client.peer, session.answer)

    def _beat(self, client: ServiceClient, awaited: dict[int, int]) -> None:
        self._left(client, [id for id in client.sessions if id not in awaited])
        missing = []
        for id, turn in awaited.items():
            session = client.sessions.get(id)
            if session is None or session.turn < turn:
                missing.append(id)
            elif session.turn == turn and session.answer is not None:
                self._send(client.peer, session.answer)
        self._send(client.peer, MissingSteps(ids=missing))

    def _answer(self, key: int, answer: Callable[[ServiceClient, int, ServedSession], Stepped | None]) -> None:
        """Keep and send what a step came to, if it is still wanted; None: the session is lost."""
        number, id = divmod(key, NUM_IDS)
        client = self._by_number.get(number)
        session = None if client is None else client.sessions.get(id)
        if client is None or session is None:
            return
        session.answer = answer(client, id, session)
        if session.answer is None:
            del client.sessions[id]
            self._send(client.peer, SessionGone(id=id))
            return
        try:
            self._send(client.peer, session.answer)
        except WireError as error:  # the user's result is too large to travel
            self._left(client, [id])
            self._send(client.peer, SessionRefused(id=id, reason=str(error)))
        else:
            self.counters["answered"] += 1

    def _left(self, client: ServiceClient, ids: Iterable[int], streams: Collection[int] = ()) -> None:
        """streams: as they are called here."""
        left = [(id, session) for id in ids if (session := client.sessions.pop(id, None)) is not None]
        client.streams.difference_update(streams)
        # One whose answer has no content had ended.
        unended = [client.key(id) for id, session in left if session.answer is None or session.answer.content is not None]
        if unended or streams:
            self._end(unended, streams)

    def _drop_silent(self, now: float) -> None:
        for peer, client in list(self._clients.items()):
            if now - client.last_seen > self._silent_s:
                streams = {each.stream for each in client.sessions.values() if each.stream is not None}
                self._left(client, list(client.sessions), client.streams | streams)
                del self._clients[peer], self._by_number[client.number]

    def _send(self, peer: bytes, message: Message) -> None:
        """Dropped where a client does not read: its beat asks again."""
        self._socket.send([[peer, self._codec.pack(message)]])

    # -- what a kind of server adds ----------------------------------------------------------------------------------

    def _environment(self) -> EnvironmentFields | None:
        """The part of `Description` that an environment has."""
        return None

    def _begin(self, client: ServiceClient, session: ServedSession, step: SessionStep) -> None:
        """Raises WireError or RewardError for a session that is refused."""
        raise NotImplementedError

    def _go_on(self, client: ServiceClient, step: SessionStep) -> None:
        """Raises WireError."""
        raise WireError("a call of a reward has one turn")

    def _show(self, client: ServiceClient, show: Show) -> None:
        """Raises RewardError where nothing is read ahead."""
        raise RewardError("there is no incremental scoring here")

    def _advance(self) -> None:
        """See to what there is. Raises RewardError or EpisodeError."""
        raise NotImplementedError

    def _end(self, keys: Collection[int], streams: Collection[int]) -> None:
        """Nothing more is wanted of these sessions and streams."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
