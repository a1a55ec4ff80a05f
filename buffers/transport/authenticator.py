"""Who is let in at a ROUTER socket: ZeroMQ's questions about keys, counters of connections, messages that never end.

With keys only peers on the allow-list are let in (CURVE; `keys.admit` decides), and every message comes with the holder of
the key that sent it: what that one may send is decided in `roles`. The list may change meanwhile. With and without keys, failed
handshakes and ended connections are counted and logged once a tick.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rlhf.buffers.protocol.wire import Frames
from async_rlhf.buffers.transport import frames, keys
from async_rlhf.buffers.transport.frames import HANDSHAKES_FAILED, bytes_received
from async_rlhf.buffers.transport.roles import Holder

_log = logging.getLogger(__name__)
UNREAD_BY_ZMQ = 64 << 20
"""More than the kernel keeps for a connection: received, and not seen by ZeroMQ yet."""
_MAX_NAMED = 8  # refused addresses named in one line of the log


class UnfinishedMessageGuard:
    """Cuts a peer whose message never ends: ZeroMQ keeps the parts of a message until the last has come, and limits only one
    part (MAXMSGSIZE) and the number of whole messages that wait (HWM).

    Once all whole messages have been received, what a connection got since the last of them is unfinished. A connection is
    shut down by its descriptor; ZeroMQ then frees what it had kept. Linux and TCP only: the kernel counts no bytes for a unix
    socket.

    Owns the bytes that each open connection had received when it was looked at after its last whole message.

    arriving: the connections over which bytes had come at the last look, since the one before.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._looked_at: set[int] = set()
        self.arriving: set[int] = set()

    def opened(self, descriptor: int) -> None:
        self._before[descriptor] = self._received[descriptor] = 0
        self._looked_at.discard(descriptor)

    def ended(self, descriptor: int) -> None:
        self._before.pop(descriptor, None)
        self._received.pop(descriptor, None)

    def message_ended(self, descriptor: int) -> None:
        """A whole message came over this connection."""
        self._looked_at.discard(descriptor)

    def cut(self, max_bytes: int) -> int:
        """Shut every connection down over which more has come since its last whole message; returns how many.

        Call it when every whole message has been handed up. What came before the first look at a connection is not counted,
        and between two looks anything may come.
        """
        num_cut = 0
        self.arriving.clear()
        for descriptor, before in list(self._before.items()):
            try:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    received = bytes_received(connection)
                    if received > self._received[descriptor]:
                        self._received[descriptor] = received
                        self.arriving.add(descriptor)
                    if descriptor not in self._looked_at:
                        self._before[descriptor] = received
                        self._looked_at.add(descriptor)
                    elif received - before > max_bytes:
                        connection.shutdown(socket.SHUT_RDWR)
                        self.ended(descriptor)
                        num_cut += 1
            except OSError:
                self.ended(descriptor)  # it has just been closed
        return num_cut


class Authenticator:
    """Lets peers in, and counts who failed to come in or went: the ZAP socket and the monitor of the hub's socket.

    Must be made before the socket is bound. With `access` the socket becomes a CURVE server whose handshakes are decided here;
    while this does not answer, no peer is let in.

    connections         open now, those in their handshake among them
    connections_ended   by either side: peers that left, died or were cut, and strangers who speak no ZeroMQ
    handshakes_failed   refused, broken off, or without keys where they are needed
    refused_handshakes  those of them with a key that is not allowed
    endless_messages    connections that were cut because a message did not end
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], access: keys.HubKeys | None) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(HANDSHAKES_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._access = access
        self._listing: list[tuple[str, int, int]] = []  # as it was read last; it may have changed since `access` was
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self.sockets = (self._monitor, self._zap)
        self.counters = dict.fromkeys(
            ("connections", "connections_ended", "handshakes_failed", "refused_handshakes", "endless_messages"), 0
        )
        self._unfinished = UnfinishedMessageGuard()
        self._identities: dict[int, bytes] = {}  # who sent the newest message over an open connection, by its descriptor
        self._keys: dict[int, bytes] = {}  # with which key
        self._reported = dict(self.counters)
        self._refused: set[str] = set()
        if access is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, keys.ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer a handshake fails rather than succeeds
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, access.secret)

    def receive(self) -> tuple[Frames, Holder | None] | None:
        """The next message and, where there are keys, whose it is; None when there is no message. Never blocks."""
        while (received := frames.receive_from(self._socket, has_keys=self._access is not None)) is not None:
            message, descriptor, key = received
            self._unfinished.message_ended(descriptor)
            self._identities[descriptor] = message[0]
            if self._access is None:
                return message, None
            self._keys[descriptor] = bytes.fromhex(key)
            if (holder := self._access.allowed.get(bytes.fromhex(key))) is not None:
                return message, holder  # else its key was revoked
        return None

    def cut_endless(self, max_bytes: int) -> None:
        """Cut peers that have sent more than this of one message; to be called when `receive` gave None."""
        self.counters["endless_messages"] += self._unfinished.cut(max_bytes)

    def arriving(self) -> list[bytes]:
        """The peers from whom bytes came between the last two calls of `cut_endless` (over TCP, on Linux)."""
        return [self._identities[each] for each in self._unfinished.arriving if each in self._identities]

    def attend(self) -> None:
        """Answer handshakes, and read the monitor. Never blocks."""
        while self._zap.poll(0):
            allowed = {} if self._access is None else self._access.allowed
            answer, refused = keys.admit(self._zap.recv_multipart(), allowed)
            self._zap.send_multipart(answer)
            if refused:
                self.counters["refused_handshakes"] += 1
                if len(self._refused) < _MAX_NAMED:
                    self._refused.add(refused)
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._count(event["event"], event["value"])

    def report(self) -> None:
        """One line for everything since the last: repeated connection attempts must not fill the disk. Looks first whether
        the list of keys has changed."""
        self._reread()
        new = {name: count - self._reported[name] for name, count in self.counters.items()}
        self._reported = dict(self.counters)
        if new["refused_handshakes"]:
            _log.warning(
                "refused %d handshakes: unknown keys, from %s", new["refused_handshakes"], ", ".join(sorted(self._refused))
            )
            self._refused.clear()
        if new["handshakes_failed"]:
            _log.warning("%d handshakes failed, the refused ones among them", new["handshakes_failed"])
        if new["endless_messages"]:
            _log.warning("cut %d connections: a message did not end", new["endless_messages"])
        if new["connections_ended"]:
            _log.info("%d connections ended, %d are open", new["connections_ended"], self.counters["connections"])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)

    def _reread(self) -> None:
        """Let in the keys that were added to the list, and cut off those that are no more on it."""
        if self._access is None:
            return
        with suppress(OSError):  # the folder is gone for a moment: nothing changes
            if (listing := self._access.listing()) == self._listing:
                return
            self._listing, before = listing, self._access.allowed
            self._access, problem = self._access.reread()
            if problem:
                _log.warning("the list of keys cannot be read, and lets no one new in: %s", problem)
            for descriptor in [each for each, key in self._keys.items() if key not in self._access.allowed]:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            if self._access.allowed != before:
                _log.info("the list of keys has changed: %d are let in", len(self._access.allowed))

    def _count(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._unfinished.opened(value)
            self.counters["connections"] += 1
        elif event & HANDSHAKES_FAILED:
            self.counters["handshakes_failed"] += 1
            self.counters["connections_ended"] -= 1  # the event of its end comes next
        else:
            self._unfinished.ended(value)
            self._identities.pop(value, None)
            self._keys.pop(value, None)
            self.counters["connections"] -= 1
            self.counters["connections_ended"] += 1
