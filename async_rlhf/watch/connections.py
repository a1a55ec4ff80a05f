"""Connections that a listener keeps: so many, and none that does not bring its request in time.

A client may open thousands and send half a request on each. One whose request is not whole ends at a deadline, and before
that gives way to a new one where there are as many as may be; a request that is sent at once is answered.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST, _SHARE = 128, 8  # connections at a time, and of the descriptors that this process may open; as many may be on their way
_DEADLINES_S = {h11.IDLE: 10.0, h11.SEND_BODY: 120.0}  # while the header is missing, and the body
_LOOK_S = 1.0


def most() -> int:
    """Connections at a time."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if descriptors < 0 else max(1, min(_MOST, descriptors // _SHARE))


class Connection(H11Protocol):
    """since: when its last request was whole, or it began, by the loop's clock."""

    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        if len(self.connections) > most():
            others = (each for each in self.connections if isinstance(each, Connection))
            waiting = (each for each in others if each._deadline_s and not each.transport.is_closing())
            min(waiting, key=lambda each: each.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._deadline_s:
            self.since = self.loop.time()

    @property
    def _deadline_s(self) -> float:
        """Seconds after `since`; 0 while its request is answered."""
        return _DEADLINES_S.get(self.conn.their_state, 0.0)

    def _look(self) -> None:
        if 0 < self._deadline_s < self.loop.time() - self.since:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
