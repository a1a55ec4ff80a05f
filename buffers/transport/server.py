"""A ROUTER socket that listens: what the hub, a relay and the scoring servers are built on.

With keys only peers on the allow-list are let in (CURVE; `keys.admit` decides), and every message comes with the holder of
the key that sent it: what that one may send, `keys.check_sender` decides. The list may change meanwhile. With and without keys,
failed handshakes and ended connections are counted (ZeroMQ's monitor) and logged once a tick.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rlhf.buffers.errors import RefusedError, WeightsError, WireError
from async_rlhf.buffers.protocol.wire import Frames, Refused
from async_rlhf.buffers.transport import frames, keys
from async_rlhf.buffers.transport.frames import HANDSHAKES_FAILED, UNKNOWN, Waker, bytes_received
from async_rlhf.buffers.transport.keys import HubKeys, KeyHolder

_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # an enumeration would cost as much as the look, once a message
# HWM counts messages, not bytes: a peer with more unread messages loses the rest.
_MAX_UNSENT = 1000
UNREAD_BY_ZMQ = 64 << 20
"""More than the kernel keeps for a connection: received, and not seen by ZeroMQ yet."""

_log = logging.getLogger(__name__)
_MAX_NAMED = 8  # refused addresses named in one line of the log
_MAX_PLACES = 100


@dataclass
class _OpenConnection:
    """An open connection: who sent the newest message over it, with which key; bytes received at the last look, and at the
    first look since the last whole message. is_counted: whether the kernel counts them."""

    is_counted: bool
    identity: bytes = b""
    key: bytes = b""
    received: int = 0
    unfinished_from: int | None = None


class ServerSocket:
    """Owns its ZeroMQ context, three sockets (its own, its monitor, ZeroMQ's questions about keys), poller and waker. One
    thread uses it; `wake` may come from any. While `wait` is not called, no peer is let in.

    max_part_bytes: beyond it ZeroMQ cuts the peer by itself. max_message_bytes: of all parts, beyond it `cut_unfinished` does.
    max_unread: whole messages of a peer that wait here, then the peer waits. max_unsent: to a peer, 0 for no limit.
    Raises zmq.ZMQError when an address is taken or cannot be. counters:

    connections         open now, those in their handshake among them
    connections_ended   by either side: peers that left, died or were cut, and strangers who speak no ZeroMQ
    handshakes_failed   refused, broken off, or without keys where they are needed
    refused_handshakes  those of them with a key that is not allowed
    endless_messages    connections that were cut because a message did not end
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
        self._access = access
        self._listing: list[tuple[str, int, int]] = []  # as it was read last; it may have changed since `access` was
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_part_bytes)
        self._socket.setsockopt(zmq.RCVHWM, max_unread)
        self._socket.setsockopt(zmq.SNDHWM, max_unsent)
        frames.watch_connections(self._socket)
        # A peer that was cut comes back under its name before the old connection is known to be dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKES_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        if access is not None:
            self._socket.setsockopt(zmq.ZAP_DOMAIN, keys.ZAP_DOMAIN)
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer a handshake fails rather than succeeds
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, access.secret)
        self._max_unfinished = max_message_bytes + UNREAD_BY_ZMQ
        self._open: dict[int, _OpenConnection] = {}  # by descriptor
        names = ("connections", "connections_ended", "handshakes_failed", "refused_handshakes", "endless_messages")
        self.counters = dict.fromkeys(names, 0)
        self._reported, self._refused = dict(self.counters), set[str]()
        self._waker, self._poller = Waker(), zmq.Poller()
        self._closed, self._closing = False, threading.RLock()  # `wake` may come while `close` runs, also from a signal handler
        for waited_for in (self._socket, self._monitor, self._zap, self._waker.descriptor):
            self.register(waited_for)
        try:
            for address in [addresses] if isinstance(addresses, str) else addresses:
                self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, a readable registered descriptor, `wake`, or the end of the time; lets peers in."""
        if ready := dict(self._poller.poll(int(timeout_s * 1000))):
            if self._waker.descriptor in ready:
                self._waker.clear()
            self._attend()

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

    def receive(self) -> tuple[Frames, KeyHolder | None] | None:
        """The next message, its sender's identity first, and the holder of the key that sent it where there are keys; None when
        there is none."""
        while (received := frames.receive_from(self._socket, has_keys=self._access is not None)) is not None:
            message, descriptor, key = received
            if descriptor != UNKNOWN:
                self._watch()  # its number may have been that of another, and it may have ended
            if (connection := self._open.get(descriptor)) is not None:
                connection.identity, connection.key, connection.unfinished_from = message[0], bytes.fromhex(key), None
            if self._access is None:
                return message, None
            if (holder := self._access.allowed.get(bytes.fromhex(key))) is not None:
                return message, holder  # else its key was revoked
        return None

    def send(self, messages: Iterable[Frames]) -> None:
        """Send messages, each beginning with the receiver's identity. Never blocks: an absent or slow peer loses them."""
        for message in messages:
            frames.send(self._socket, message)

    def cut_unfinished(self) -> list[bytes]:
        """Cut peers whose message does not end; returns the identities from which bytes came since the last call.

        ZeroMQ keeps the parts of a message until the last has come, and limits only one part (MAXMSGSIZE) and the number of
        whole messages that wait (HWM). Call this when `receive` gave None: what a connection got since its last whole message
        is then unfinished, but for what came before the first look at it; between two looks anything may come. A connection is
        shut down by its descriptor; ZeroMQ then frees what it had kept. Linux and TCP only: the kernel counts no bytes for a
        unix socket.
        """
        arriving = []
        for descriptor, connection in [each for each in self._open.items() if each[1].is_counted]:
            try:
                received = bytes_received(descriptor)
                if received > connection.received:
                    connection.received = received
                    arriving.append(connection.identity)
                if connection.unfinished_from is None:
                    connection.unfinished_from = received
                elif received - connection.unfinished_from > self._max_unfinished:
                    _shut_down(descriptor)
                    del self._open[descriptor]
                    self.counters["endless_messages"] += 1
            except OSError:
                del self._open[descriptor]  # it has just been closed
        return arriving

    def report(self) -> None:
        """One line for everything since the last: repeated connection attempts must not fill the disk. Looks first whether
        the list of keys has changed."""
        self._reread()
        new = {name: count - self._reported[name] for name, count in self.counters.items()}
        self._reported = dict(self.counters)
        if new["refused_handshakes"]:
            named = ", ".join(sorted(self._refused))
            _log.warning("refused %d handshakes: unknown keys, from %s", new["refused_handshakes"], named)
            self._refused.clear()
        if new["handshakes_failed"]:
            _log.warning("%d handshakes failed, the refused ones among them", new["handshakes_failed"])
        if new["endless_messages"]:
            _log.warning("cut %d connections: a message did not end", new["endless_messages"])
        if new["connections_ended"]:
            _log.info("%d connections ended, %d are open", new["connections_ended"], self.counters["connections"])

    def close(self) -> None:
        """Close; unsent messages are sent for `linger_ms` at most."""
        with self._closing:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._zap.close(0)
            self._socket.close()
            self._context.term()
            self._waker.close()

    def _attend(self) -> None:
        """Answer handshakes, and read the monitor. Never blocks."""
        while self._zap.poll(0):
            allowed = {} if self._access is None else self._access.allowed
            answer, refused = keys.admit(self._zap.recv_multipart(), allowed)
            self._zap.send_multipart(answer)
            if refused:
                self.counters["refused_handshakes"] += 1
                if len(self._refused) < _MAX_NAMED:
                    self._refused.add(refused)
        self._watch()

    def _watch(self) -> None:
        """Read the monitor's events, at least those from before the received messages."""
        while int(self._monitor.get(_EVENTS)) & _READABLE:
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._count(event["event"], event["value"], event["endpoint"])

    def _reread(self) -> None:
        """Admit keys that were added to the list, and cut off the removed ones."""
        if self._access is None:
            return
        with suppress(OSError):  # the folder is gone for a moment: nothing changes
            if (listing := self._access.listing()) == self._listing:
                return
            self._listing, before = listing, self._access.allowed
            self._access, problem = self._access.reread()
            if problem:
                _log.warning("the list of keys cannot be read, and lets no one new in: %s", problem)
            keys_of = {descriptor: connection.key for descriptor, connection in self._open.items() if connection.key}
            for descriptor in [each for each, key in keys_of.items() if key not in self._access.allowed]:
                with suppress(OSError):
                    _shut_down(descriptor)
            if self._access.allowed != before:
                _log.info("the list of keys has changed: %d are let in", len(self._access.allowed))

    def _count(self, event: int, value: int, endpoint: bytes) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._open[value] = _OpenConnection(is_counted=endpoint.startswith(b"tcp:"))
            self.counters["connections"] += 1
        elif event & HANDSHAKES_FAILED:
            self.counters["handshakes_failed"] += 1
            self.counters["connections_ended"] -= 1  # the event of its end comes next
        else:
            self._open.pop(value, None)
            self.counters["connections"] -= 1
            self.counters["connections_ended"] += 1


def _shut_down(descriptor: int) -> None:
    """Raises OSError when it is closed."""
    with sockets.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(sockets.SHUT_RDWR)


class Refusals:
    """`counts`: since the hub began, by reason. Reasons are words of our own, never of a peer's."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._last = ""
        self._known: set[tuple[str, int | None]] = set()  # where unforeseen errors came from

    def note(self, error: Exception, who: str) -> Refused:
        """Count an error; returns the answer to its sender. An error of another type is a defect, counted as `unforeseen`."""
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
