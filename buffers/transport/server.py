"""A ROUTER socket that listens: what the hub, a relay and the scoring servers are built on."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import zmq

from async_rlhf.buffers.errors import RefusedError, WeightsError, WireError
from async_rlhf.buffers.protocol.wire import Frames, Refused
from async_rlhf.buffers.transport import frames
from async_rlhf.buffers.transport.authenticator import UNREAD_BY_ZMQ, Authenticator
from async_rlhf.buffers.transport.frames import Waker
from async_rlhf.buffers.transport.keys import HubKeys
from async_rlhf.buffers.transport.roles import Holder

# HWM counts messages, not bytes: a peer that does not read so many loses the rest.
_MAX_UNSENT = 1000

_log = logging.getLogger(__name__)
_MAX_PLACES = 100


class ServerSocket:
    """Owns its ZeroMQ context, socket, authenticator, poller and waker. One thread uses it; `wake` may come from any.

    max_part_bytes: beyond it ZeroMQ cuts the peer by itself. max_message_bytes: of all parts, beyond it `cut_unfinished` does.
    max_unread: whole messages of a peer that wait here, then the peer waits. max_unsent: to a peer, 0 for no limit.
    Raises zmq.ZMQError when an address is taken or cannot be.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        access: HubKeys | None = None,
        *,
        max_part_bytes: int,
        max_message_bytes: int,
        max_unread: int,
        max_unsent: int = _MAX_UNSENT,
        linger_ms: int = 0,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_part_bytes)
        self._socket.setsockopt(zmq.RCVHWM, max_unread)
        self._socket.setsockopt(zmq.SNDHWM, max_unsent)
        # A peer that was cut comes back under its name before the old connection is known to be dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._max_unfinished = max_message_bytes + UNREAD_BY_ZMQ
        self._authenticator = Authenticator(self._context, self._socket, access)
        self._waker, self._poller = Waker(), zmq.Poller()
        self._closed, self._closing = False, threading.RLock()  # `wake` may come while `close` runs, also from a signal handler
        for waited_for in (self._socket, *self._authenticator.sockets, self._waker.descriptor):
            self._poller.register(waited_for, zmq.POLLIN)
        try:
            for address in [addresses] if isinstance(addresses, str) else addresses:
                self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.counters = self._authenticator.counters

    def wait(self, timeout_s: float) -> None:
        """Until a message came, something that was registered is readable, `wake`, or the time is over; lets peers in."""
        if ready := dict(self._poller.poll(int(timeout_s * 1000))):
            if self._waker.descriptor in ready:
                self._waker.clear()
            self._authenticator.attend()

    def wake(self) -> None:
        """End a `wait`; also when the socket is closed."""
        with self._closing:
            if not self._closed:
                self._waker.ring()

    def register(self, waited_for: Any) -> None:
        """A socket or descriptor that `wait` watches too."""
        self._poller.register(waited_for, zmq.POLLIN)

    def unregister(self, waited_for: Any) -> None:
        self._poller.unregister(waited_for)

    def receive(self) -> tuple[Frames, Holder | None] | None:
        """The next message, its sender's identity first, and the holder of the key that sent it; None when there is none."""
        return self._authenticator.receive()

    def send(self, messages: Iterable[Frames]) -> None:
        """Never blocks: a peer that is gone, or reads too slowly, loses them. Each begins with the receiver's identity."""
        for message in messages:
            frames.send(self._socket, message)

    def cut_unfinished(self) -> list[bytes]:
        """Cut peers whose message does not end; returns the identities from which bytes came since the last call.

        Call it when `receive` gave None.
        """
        self._authenticator.cut_endless(self._max_unfinished)
        return self._authenticator.arriving()

    def report(self) -> None:
        """One line of the log for all refused and ended connections since the last call."""
        self._authenticator.report()

    def close(self) -> None:
        """Sends what is unsent for `linger_ms`."""
        with self._closing:
            self._closed = True
            self._authenticator.close()
            self._socket.close()
            self._context.term()
            self._waker.close()


class Refusals:
    """`counts`: since the hub began, by reason. Reasons are words of our own, never of a peer's."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._last = ""
        self._known: set[tuple[str, int | None]] = set()  # where unforeseen errors came from

    def note(self, error: Exception, who: str) -> Refused:
        """Count it; the answer for who sent it. What is none of our errors is a defect, and counted as `unforeseen`."""
        if isinstance(error, WireError | RefusedError):
            reason, detail = error.reason, error.detail if isinstance(error, RefusedError) else str(error)
        elif isinstance(error, WeightsError):
            reason, detail = "weights", str(error)
        else:
            reason, detail = "unforeseen", f"a defect of the hub: {error!r}"[:300]
            self._log_once(error, who)
        self.counts[reason] += 1
        self._last = f"{reason} from {who}: {detail}"
        return Refused(reason=reason, detail=detail)

    def _log_once(self, error: Exception, who: str) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = place.filename, place.lineno
        if where not in self._known and len(self._known) < _MAX_PLACES:
            self._known.add(where)
            _log.error("unforeseen, in a message from %s; please report it", who, exc_info=error)

    def report(self) -> None:
        """One line for everything since the last report."""
        if self.counts != self._reported:
            _log.warning("refused %s; the last: %s", dict(self.counts - self._reported), self._last)
            self._reported = Counter(self.counts)
