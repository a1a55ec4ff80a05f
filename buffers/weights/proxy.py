"""What a relay does with every message. Knows no socket on the actors' side, and none of the hub's but through links.

Messages of actors go to the hub over a link of their own, and those of the hub go back, unchanged; requests about
weights are answered here (`cache`). Only messages of actors pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import RefusedError, WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import Link
from async_rlhf.buffers.transport.roles import Holder, check
from async_rlhf.buffers.transport.server import Refusals
from async_rlhf.buffers.weights.cache import WeightCache

_log = logging.getLogger(__name__)
_IDLE_S = 60.0  # of a silent actor; a living one beats every second or so
_ANY_REQUEST = 1 << 62  # above every request number of an actor's
_FORWARDED = (wire.Hello, wire.Beat, wire.Put, wire.Release, wire.Bye)


@dataclass
class _Line:
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
        self._lines: dict[bytes, _Line] = {}
        self._refusals = Refusals()
        self.outbox: list[wire.Frames] = []

    def take(self, identity: bytes, frames: wire.Frames, holder: Holder | None) -> None:
        """One message of an actor, sent with the key of `holder` where there are keys."""
        request = 0
        try:
            request, message, _ = wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)
            check(holder, message)
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
        """Time has passed: close idle connections, and log what was refused."""
        self._refusals.report()
        now = self._fetch_link.clock()
        for identity in [identity for identity, line in self._lines.items() if now - line.last_seen > _IDLE_S]:
            self._disconnect(identity)

    def close(self) -> None:
        for identity in list(self._lines):
            self._disconnect(identity)
        self._close(self._fetch_link)

    def _line(self, identity: bytes) -> _Line:
        if identity not in self._lines:
            self._lines[identity] = _Line(self._open("relayed"), 0.0)
            _log.info("%d actors are relayed", len(self._lines))
        self._lines[identity].last_seen = self._fetch_link.clock()
        return self._lines[identity]

    def _disconnect(self, identity: bytes) -> None:
        line = self._lines.pop(identity, None)
        if line is not None:
            self._close(line.link)
