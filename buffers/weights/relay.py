"""A relay between the hub and the actors of one host, or of one site: to the actors it is the hub.

    owns        a ROUTER socket, one link to the hub for each actor, one more to fetch by, the newest weight sets; one thread
    waits for   a message from an actor or from the hub
    woken by    any of them, or `stop`
    on close    sockets closed; actors send Hello to the next relay at its address

Messages of actors go to the hub over a link of their own, and those of the hub go back, unchanged; only those of actors pass.
A weight set, or the deltas to it, is fetched from the hub once, verified, and served from here to all who ask (`WeightCache`),
over memory where they are on this machine. So what the hub sends does not grow with the number of actors behind a relay; relays
may stand behind relays. It holds no groups: a relay that dies loses nothing. `RelayProxy` knows no socket on the actors' side,
and none of the hub's but through links.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import ConfigError, RefusedError, WeightsError, WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.keys import HubKeys, KeyHolder, check_sender
from async_rlhf.buffers.transport.link import Connect, Link, SocketLink
from async_rlhf.buffers.transport.server import Refusals, ServerSocket
from async_rlhf.buffers.weights.receiver import WeightReceiver
from async_rlhf.buffers.weights.server import WeightServer
from async_rlhf.buffers.weights.shared import HeapPool, SealedPool
from async_rlhf.buffers.weights.store import WeightStore

_TICK_S = 1.0
_MAX_FRAME_BYTES = 128 << 20
_MAX_MESSAGE_BYTES = wire.MAX_HEADER_BYTES + 2 * _MAX_FRAME_BYTES
_UNREAD = 16  # messages of one actor that may wait here; then it waits
_KEPT = 2  # sets: the newest, and the one that slow actors may be fetching still
_log = logging.getLogger(__name__)
_IDLE_S = 60.0  # of a silent actor; a living one beats every second or so
_ANY_REQUEST = 1 << 62  # above every request number of an actor's
_FORWARDED = (wire.Hello, wire.Beat, wire.Put, wire.Release, wire.Bye)


Target = tuple[int, int]


@dataclass
class _ActorLine:
    """One actor's own connection to the hub."""

    link: Link
    last_seen: float


class RelayProxy:
    """Owns the links to the hub, made by `open_link` with a name and ended by `close_link`, and the weights.

    outbox: messages to send to actors, each [identity, header, arrays...], in order.
    """

    def __init__(
        self,
        hub_address: str,
        config: WeightsConfig,
        open_link: Callable[[str], Link],
        close_link: Callable[[Link], None],
    ) -> None:
        self._open, self._close = open_link, close_link
        self._fetch_link = open_link("relay")
        self._cache = WeightCache(self._fetch_link, hub_address, config)
        self._lines: dict[bytes, _ActorLine] = {}
        self._refusals = Refusals()
        self.outbox: list[wire.Frames] = []

    def take(self, identity: bytes, frames: wire.Frames, holder: KeyHolder | None) -> None:
        """One message of an actor, sent with the key of `holder` where there are keys."""
        request = 0
        try:
            request, message, _ = wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)
            check_sender(holder, message)
            self._pass_on(identity, request, message, frames)
        except (WireError, RefusedError) as error:
            refused = self._refusals.note(error, identity[:40].hex())
            self.outbox.append([identity, *wire.encode(refused, request=request)])

    def _pass_on(self, identity: bytes, request: int, message: wire.Message, frames: wire.Frames) -> None:
        if isinstance(message, wire.Fetch | wire.FetchChunk):
            self._cache.request(identity, request, message)
        elif isinstance(message, _FORWARDED):
            self._line(identity).link.send(frames)
            if isinstance(message, wire.Bye):
                self._disconnect(identity)
        else:
            raise RefusedError("relay", f"a relay forwards no {message.type!r}")

    @property
    def has_work(self) -> bool:
        """Whether `turn` has more to do although nothing more comes."""
        return self._cache.has_work

    def turn(self) -> None:
        """Take in the hub's messages; a piece of verification. Raises DeadlineError when the hub does not let this relay in."""
        while (frames := self._fetch_link.receive(0)) is not None:
            self._cache.receive(frames)
        if self._fetch_link.was_remade():
            self._cache.again()
        self._cache.advance()
        self.outbox += self._cache.answers
        self._cache.answers.clear()
        for identity, line in self._lines.items():
            while (frames := line.link.receive(0)) is not None:
                self.outbox.append([identity, *frames])
            if line.link.was_remade():
                # The actor cannot see it, and must send Hello with what it holds.
                lost = wire.Refused(reason="unknown-actor", detail="the relay's connection to the hub was lost")
                self.outbox.append([identity, *wire.encode(lost, request=_ANY_REQUEST)])

    def tick(self) -> None:
        """Close idle connections, and log refusals."""
        self._refusals.report()
        now = self._fetch_link.clock()
        for identity in [identity for identity, line in self._lines.items() if now - line.last_seen > _IDLE_S]:
            self._disconnect(identity)

    def close(self) -> None:
        for identity in list(self._lines):
            self._disconnect(identity)
        self._close(self._fetch_link)

    def _line(self, identity: bytes) -> _ActorLine:
        if identity not in self._lines:
            self._lines[identity] = _ActorLine(self._open("relayed"), 0.0)
            _log.info("%d actors are relayed", len(self._lines))
        self._lines[identity].last_seen = self._fetch_link.clock()
        return self._lines[identity]

    def _disconnect(self, identity: bytes) -> None:
        line = self._lines.pop(identity, None)
        if line is not None:
            self._close(line.link)


class WeightCache:
    """A relay's weight sets: each is fetched from the hub once, verified, and served to all who ask. Waits for nothing.

    Owns the newest sets and the one that is on its way.

    fetch_link: what sends to the hub. answers: [identity, header, bytes...] to send to the actors.
    """

    def __init__(self, fetch_link: Link, hub_address: str, config: WeightsConfig) -> None:
        self._link, self._last_request = fetch_link, 0
        self._weight_server = WeightServer(WeightStore(), config)
        make = (HeapPool() if config.transport == "chunks" else SealedPool()).make
        self._weight_receiver = WeightReceiver(self._send, fetch_link.clock, hub_address, config, make)
        self._waiting: dict[Target, list[tuple[bytes, int, wire.Fetch]]] = {}
        self._current: Target | None = None
        self._kept: list[Target] = []
        self.answers: list[wire.Frames] = []

    def request(self, identity: bytes, request: int, wanted: wire.Fetch | wire.FetchChunk) -> None:
        """Answer an actor now, or when the set has come."""
        target = wanted.fence, wanted.version
        if isinstance(wanted, wire.Fetch) and target not in self._kept:
            self._waiting.setdefault(target, []).append((identity, request, wanted))
            self._fetch_next()
        else:
            self._answer(identity, request, wanted)

    def receive(self, frames: wire.Frames) -> None:
        """A message of the hub about the set that is fetched."""
        request, message, arrays = wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)
        if isinstance(message, wire.Manifest | wire.Chunk):
            self._weight_receiver.receive(message, arrays)
        elif isinstance(message, wire.Refused) and self._weight_receiver.refused(request):
            self._give_up(message.detail)

    @property
    def has_work(self) -> bool:
        return self._weight_receiver.has_work

    def advance(self) -> None:
        """Verify a piece of the set on its way; after the last piece answer the actors that wait for it."""
        try:
            self._weight_receiver.advance()
        except WeightsError as error:
            self._give_up(str(error))
            return
        weights = self._weight_receiver.take()
        if weights is None:
            return
        store, target = self._weight_server.store, (weights.fence, weights.version)
        store.add(weights, self._weight_receiver.applied)
        self._kept = [*[kept for kept in self._kept if kept[1] in store and kept[1] != target[1]], target][-_KEPT:]
        store.keep({version for _, version in self._kept}.__contains__)
        self._current = None
        for identity, request, wanted in self._waiting.pop(target, []):
            self._answer(identity, request, wanted)
        self._fetch_next()

    def again(self) -> None:
        """The connection to the hub was lost: repeat the requests under way."""
        self._weight_receiver.reset()
        self._current = None
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._current is None and self._waiting:
            self._current = max(self._waiting)
            self._weight_receiver.adopt(self._current)

    def _give_up(self, why: str) -> None:
        """The set on its way will not come: answer the actors that wait for it, which get a newer target."""
        refused = [] if self._current is None else self._waiting.pop(self._current, [])
        self._current = None
        for identity, request, _ in refused:
            self._queue(identity, wire.Refused(reason="weights", detail=why), request)
        self._fetch_next()

    def _answer(self, identity: bytes, request: int, wanted: wire.Fetch | wire.FetchChunk) -> None:
        try:
            for message, arrays in self._weight_server.serve(wanted):
                self._queue(identity, message, request, arrays)
        except WeightsError as error:
            self._queue(identity, wire.Refused(reason="weights", detail=str(error)), request)

    def _queue(self, identity: bytes, message: wire.Message, request: int, arrays: wire.Frames | None = None) -> None:
        self.answers.append([identity, *wire.encode(message, arrays, request)])

    def _send(self, message: wire.Message) -> int:
        self._last_request += 1
        self._link.send(wire.encode(message, request=self._last_request))
        return self._last_request


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
        try:
            self._socket = ServerSocket(
                address, access, max_part_bytes=_MAX_FRAME_BYTES, max_message_bytes=_MAX_MESSAGE_BYTES, max_unread=_UNREAD
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"{address!r} cannot be listened at: {error}") from error
        self._proxy = RelayProxy(hub_address, config, self._open, self._close)
        self._stopped = False

    def stop(self) -> None:
        """End `run`; may be called from any thread, also when it has ended."""
        self._stopped = True
        self._socket.wake()

    def run(self) -> None:
        """Serve until `stop`. Raises DeadlineError, with the reason, when the hub does not let this relay in."""
        next_tick = 0.0
        try:
            while not self._stopped:
                self._socket.wait(0 if self._proxy.has_work else _TICK_S)
                while (received := self._socket.receive()) is not None:
                    (identity, *message), holder = received
                    self._proxy.take(identity, message, holder)
                self._proxy.turn()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    self._socket.cut_unfinished()
                    self._socket.report()
                    self._proxy.tick()
                self._socket.send(self._proxy.outbox)
                self._proxy.outbox.clear()
        finally:
            self._proxy.close()
            self._socket.close()

    def _open(self, name: str) -> Link:
        link = self._connect(self._hub_address, name)
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._socket.register(waited_for)
        return link

    def _close(self, link: Link) -> None:
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._socket.unregister(waited_for)
        link.close()
