"""A relay's weight sets: each is fetched from the hub once, verified, and served to all who ask. Knows no socket.

Waits for nothing: `proxy` hands it the messages of actors and hub, and calls `advance` when it has time.
"""

from __future__ import annotations

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import Link
from async_rlhf.buffers.weights.receiver import WeightReceiver
from async_rlhf.buffers.weights.server import WeightServer
from async_rlhf.buffers.weights.shared import HeapPool, SealedMemory
from async_rlhf.buffers.weights.store import WeightStore

_KEPT = 2  # sets: the newest, and the one that slow actors may be fetching still

Target = tuple[int, int]


class WeightCache:
    """Owns the newest sets and the one that is on its way.

    fetch_link: what sends to the hub. answers: [identity, header, bytes...] to send to the actors.
    """

    def __init__(self, fetch_link: Link, hub_address: str, config: WeightsConfig) -> None:
        self._link, self._last_request = fetch_link, 0
        self._weight_server = WeightServer(WeightStore(), config)
        make = HeapPool().make if config.transport == "chunks" else SealedMemory.make
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
        elif isinstance(message, wire.Refused):
            self._weight_receiver.refused(request)
            self._give_up(message.detail)

    @property
    def has_work(self) -> bool:
        return self._weight_receiver.has_work

    def advance(self) -> None:
        """Verify a piece of what has come; answer who waits for it when that was the last."""
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
        store.keep_only([version for _, version in self._kept])
        self._current = None
        for identity, request, wanted in self._waiting.pop(target, []):
            self._answer(identity, request, wanted)
        self._fetch_next()

    def again(self) -> None:
        """The connection to the hub was lost: ask again for what was under way."""
        self._weight_receiver.reset()
        self._current = None
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._current is None and self._waiting:
            self._current = max(self._waiting)
            self._weight_receiver.adopt(self._current)

    def _give_up(self, why: str) -> None:
        """The set that is fetched will not come; who waits for it is answered, and gets a newer target."""
        refused = [] if self._current is None else self._waiting.pop(self._current, [])
        self._current = None
        for identity, request, _ in refused:
            self._queue(identity, wire.Refused(reason="weights", detail=why), request)
        self._fetch_next()

    def _answer(self, identity: bytes, request: int, wanted: wire.Fetch | wire.FetchChunk) -> None:
        try:
            message, arrays = self._weight_server.serve(wanted)
        except WeightsError as error:
            message, arrays = wire.Refused(reason="weights", detail=str(error)), []
        self._queue(identity, message, request, arrays)

    def _queue(self, identity: bytes, message: wire.Message, request: int, arrays: wire.Frames | None = None) -> None:
        self.answers.append([identity, *wire.encode(message, arrays, request)])

    def _send(self, message: wire.Message) -> int:
        self._last_request += 1
        self._link.send(wire.encode(message, request=self._last_request))
        return self._last_request
