"""A relay between the hub and the actors of one host, or of one site: to the actors it is the hub.

    owns        a ROUTER socket, one link to the hub for each actor, one more to fetch by, and the newest weight sets
    waits for   a message from an actor or from the hub
    woken by    any of them, or `stop`
    on close    sockets closed; actors say Hello to whoever comes back at its address

What actors and the hub say to each other goes through unchanged, but for weights: a set, or the deltas to it, is fetched
from the hub once, verified, and served from here to all who ask, over memory where they are on this machine. So what the
hub sends does not grow with the number of actors behind a relay; relays may stand behind relays. Only what actors say is
let through. Nobody's groups are here: a relay that dies loses nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import zmq

from buffers.config import WeightsConfig
from buffers.errors import ConfigError, RefusedError, WeightsError, WireError
from buffers.hub.gate import UNREAD_BY_ZMQ, Gate
from buffers.hub.refusals import Refusals
from buffers.protocol import wire
from buffers.transport.frames import send
from buffers.transport.keys import HubKeys
from buffers.transport.link import Connect, SocketLink
from buffers.transport.roles import check
from buffers.weights.fetching import Fetching
from buffers.weights.publication import Publication
from buffers.weights.shared import HeapPool, SealedMemory
from buffers.weights.store import WeightStore

_log = logging.getLogger(__name__)
_KEPT = 2  # sets: the newest, and the one that slow actors may be fetching still
_IDLE_S = 60.0  # of an actor that says nothing; a living one beats every second or so
_TICK_S = 1.0
_MAX_FRAME_BYTES = 128 << 20
_MAX_UNFINISHED = wire.MAX_HEADER_BYTES + 2 * _MAX_FRAME_BYTES + UNREAD_BY_ZMQ
_UNREAD = 16  # messages of one actor that may wait here; then it waits
_ANY_REQUEST = 1 << 62  # above every request number of an actor's
_FORWARDED = (wire.Hello, wire.Beat, wire.Put, wire.Release, wire.Bye)

Target = tuple[int, int]


class WeightCache:
    """Fetches each set that is asked for once. Knows no socket.

    fetch_link: what sends to the hub, with `clock`. answers: [identity, header, bytes...] to send to the actors.
    """

    def __init__(self, fetch_link: SocketLink, hub_address: str, config: WeightsConfig) -> None:
        self._link, self._last_request = fetch_link, 0
        self._publication = Publication(WeightStore(), config)
        make = HeapPool().make if config.transport == "chunks" else SealedMemory.make
        self._fetching = Fetching(self._send, hub_address, config, make)
        self._waiting: dict[Target, list[tuple[bytes, int, wire.Fetch]]] = {}
        self._current: Target | None = None
        self._kept: list[Target] = []
        self.answers: list[wire.Frames] = []

    def ask(self, identity: bytes, request: int, asked: wire.Fetch | wire.FetchChunk) -> None:
        """Answer an actor now, or when the set has come."""
        target = asked.fence, asked.version
        if isinstance(asked, wire.Fetch) and target not in self._kept:
            self._waiting.setdefault(target, []).append((identity, request, asked))
            self._fetch_next()
        else:
            self._answer(identity, request, asked)

    def hear(self, frames: wire.Frames) -> None:
        """A message of the hub about the set that is fetched."""
        request, message, arrays = wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)
        if isinstance(message, wire.Manifest | wire.Chunk):
            self._fetching.hear(message, arrays)
        elif isinstance(message, wire.Refused):
            self._fetching.refused(request)
            self._give_up(message.detail)

    @property
    def has_work(self) -> bool:
        return self._fetching.has_work

    def advance(self) -> None:
        """Verify a piece of what has come; answer who waits for it when that was the last."""
        try:
            self._fetching.advance()
        except WeightsError as error:
            self._give_up(str(error))
            return
        weights = self._fetching.take()
        if weights is None:
            return
        store, target = self._publication.store, (weights.fence, weights.version)
        store.add(weights, self._fetching.applied)
        self._kept = [*[kept for kept in self._kept if kept[1] in store and kept[1] != target[1]], target][-_KEPT:]
        store.keep_only([version for _, version in self._kept])
        self._current = None
        for identity, request, asked in self._waiting.pop(target, []):
            self._answer(identity, request, asked)
        self._fetch_next()

    def again(self) -> None:
        """The connection to the hub was lost: ask again for what was under way."""
        self._fetching.reset()
        self._current = None
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._current is None and self._waiting:
            self._current = max(self._waiting)
            self._fetching.adopt(self._current)

    def _give_up(self, why: str) -> None:
        """The set that is fetched will not come; who waits for it is told, and will be told of a newer one."""
        refused = [] if self._current is None else self._waiting.pop(self._current, [])
        self._current = None
        for identity, request, _ in refused:
            self._say(identity, wire.Refused(reason="weights", detail=why), request)
        self._fetch_next()

    def _answer(self, identity: bytes, request: int, asked: wire.Fetch | wire.FetchChunk) -> None:
        try:
            message, arrays = self._publication.serve(asked)
        except WeightsError as error:
            message, arrays = wire.Refused(reason="weights", detail=str(error)), []
        self._say(identity, message, request, arrays)

    def _say(self, identity: bytes, message: wire.Message, request: int, arrays: wire.Frames | None = None) -> None:
        self.answers.append([identity, *wire.encode(message, arrays, request)])

    def _send(self, message: wire.Message) -> int:
        self._last_request += 1
        self._link.send(wire.encode(message, request=self._last_request))
        return self._last_request


@dataclass
class _Line:
    """One actor's own connection to the hub."""

    link: SocketLink
    heard_at: float = field(default_factory=time.monotonic)


class Relay:
    """Raises ConfigError when the address is taken or cannot be. `access` as for a hub, `connect` as for an actor."""

    def __init__(
        self,
        hub_address: str,
        address: str,
        config: WeightsConfig,
        connect: Connect = SocketLink,
        access: HubKeys | None = None,
    ) -> None:
        self._hub_address, self._connect = hub_address, connect
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)  # beyond it ZeroMQ cuts the actor by itself
        self._socket.setsockopt(zmq.RCVHWM, _UNREAD)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._gate = Gate(self._context, self._socket, access)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy(linger=0)
            raise ConfigError(f"{address!r} cannot be listened at: {error}") from error
        self._fetch_link = self._open("relay")
        self._cache = WeightCache(self._fetch_link, hub_address, config)
        self._lines: dict[bytes, _Line] = {}
        self._refusals = Refusals()
        self._poller = zmq.Poller()
        for waited_for in (self._socket, *self._gate.sockets, *self._fetch_link.sockets):
            self._poller.register(waited_for, zmq.POLLIN)
        self._stopped, self._ending = False, threading.RLock()  # `stop` may come while `run` ends

    def stop(self) -> None:
        """End `run`; may be called from any thread, also when it has ended."""
        with self._ending:
            self._stopped = True
            if not self._socket.closed:
                self._fetch_link.wake()

    def run(self) -> None:
        """Serve until `stop`. Raises DeadlineError, with the reason, when the hub does not let this relay in."""
        looks_at = 0.0
        try:
            while not self._stopped:
                self._poller.poll(0 if self._cache.has_work else int(_TICK_S * 1000))
                self._gate.attend()
                self._from_actors()
                if time.monotonic() >= looks_at:
                    looks_at = time.monotonic() + _TICK_S
                    self._gate.cut_endless(_MAX_UNFINISHED)
                self._from_hub()
                self._gate.report()
                self._refusals.report()
                self._hang_up_idle()
        finally:
            with self._ending:
                self._gate.close()
                self._context.destroy(linger=0)
                for identity in list(self._lines):
                    self._hang_up(identity)
                self._fetch_link.close()

    def _from_actors(self) -> None:
        while (received := self._gate.receive()) is not None:
            (identity, *frames), holder = received
            request = 0
            try:
                request, message, _ = wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)
                check(holder, message)
                self._pass_on(identity, request, message, frames)
            except (WireError, RefusedError) as error:
                refused = self._refusals.note(error, identity[:40].hex())
                self._send([identity, *wire.encode(refused, request=request)])

    def _pass_on(self, identity: bytes, request: int, message: wire.Message, frames: wire.Frames) -> None:
        if isinstance(message, wire.Fetch | wire.FetchChunk):
            self._cache.ask(identity, request, message)
        elif isinstance(message, _FORWARDED):
            self._line(identity).link.send(frames)
            if isinstance(message, wire.Bye):
                self._hang_up(identity)
        else:
            raise RefusedError("relay", f"a relay lets no {message.type!r} through")

    def _from_hub(self) -> None:
        while (frames := self._fetch_link.receive(0)) is not None:
            self._cache.hear(frames)
        if self._fetch_link.was_remade():
            self._cache.again()
        self._cache.advance()
        for answer in self._cache.answers:
            self._send(answer)
        self._cache.answers.clear()
        for identity, line in self._lines.items():
            while (frames := line.link.receive(0)) is not None:
                self._send([identity, *frames])
            if line.link.was_remade():
                # The actor cannot see it, and must say again what it holds.
                lost = wire.Refused(reason="unknown-actor", detail="the relay's connection to the hub was lost")
                self._send([identity, *wire.encode(lost, request=_ANY_REQUEST)])

    def _line(self, identity: bytes) -> _Line:
        if identity not in self._lines:
            self._lines[identity] = _Line(self._open("relayed"))
            for waited_for in self._lines[identity].link.sockets:
                self._poller.register(waited_for, zmq.POLLIN)
            _log.info("%d actors are relayed", len(self._lines))
        self._lines[identity].heard_at = time.monotonic()
        return self._lines[identity]

    def _open(self, name: str) -> SocketLink:
        link = self._connect(self._hub_address, name)
        assert isinstance(link, SocketLink)
        return link

    def _hang_up_idle(self) -> None:
        now = time.monotonic()
        for identity in [identity for identity, line in self._lines.items() if now - line.heard_at > _IDLE_S]:
            self._hang_up(identity)

    def _hang_up(self, identity: bytes) -> None:
        line = self._lines.pop(identity, None)
        if line is not None:
            for waited_for in line.link.sockets:
                self._poller.unregister(waited_for)
            line.link.close()

    def _send(self, message: wire.Frames) -> None:
        """Never blocks: an actor that is gone, or too slow, loses it."""
        send(self._socket, message)
