"""Messages of several frames in and out of a ZeroMQ socket, without waiting. Large frames are handed over, not copied.

A frame that was received by reference keeps its message alive; one that is sent by reference must not change any more.
"""

from __future__ import annotations

import os
import socket as sockets
import struct
import sys
from contextlib import suppress
from typing import cast

import zmq

from async_rlhf.buffers.protocol.wire import Frames

# Flags as plain integers: combining those of an enumeration costs more than sending a small frame.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Passing a frame by reference costs about as much as copying this many bytes.
_LARGE = 1 << 16
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received of struct tcp_info (linux/tcp.h)
_HAS_COUNT = sys.platform == "linux"
HANDSHAKES_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Events of a socket's monitor."""
UNKNOWN = -1
"""Descriptor of a connection that ZeroMQ does not report: its peer has a protocol from before version 3."""

# A peer is dead, and its connection closed, when the kernel at its end acknowledges nothing for so long. Kernels answer for a
# process that is busy or frozen, and while one large frame takes minutes, as heartbeats of ZeroMQ would not.
_DEAD_AFTER_S = 25
_IDLE_S, _PROBE_EVERY_S = 10, 5  # also keeps a connection known to a router that forgets idle ones
_CONNECT_S = 5  # then another attempt: the kernel's own come after pauses that double


def watch_connections(socket: zmq.Socket[bytes]) -> None:
    """Let the socket close TCP connections whose other end is gone, so that it makes them anew. Else a cut of a minute could
    cost two, and one towards a host that is no more is kept for a quarter of an hour. Before `connect` or `bind`."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, (_DEAD_AFTER_S - _IDLE_S) // _PROBE_EVERY_S)
    socket.setsockopt(zmq.TCP_MAXRT, _DEAD_AFTER_S * 1000)  # data that is not acknowledged; Linux only
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_S * 1000)


def receive(socket: zmq.Socket[bytes]) -> Frames | None:
    """The next message, or None when there is none."""
    parts = _receive(socket)
    return None if parts is None else _data(parts)


def receive_from(socket: zmq.Socket[bytes], *, has_keys: bool) -> tuple[Frames, int, str] | None:
    """Like `receive`, with the descriptor of the connection and the sender's key as `keys.admit` names it."""
    parts = _receive(socket)
    if parts is None:
        return None
    try:
        descriptor = int(parts[0].get(zmq.SRCFD))
    except zmq.ZMQError:
        descriptor = UNKNOWN
    return _data(parts), descriptor, str(parts[0].get("User-Id")) if has_keys else ""


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    parts: list[zmq.Frame] = []
    try:
        while True:
            parts.append(part := socket.recv(_NOW, copy=False))
            if not part.more:
                return parts
    except zmq.Again:
        return None


def _data(parts: list[zmq.Frame]) -> Frames:
    return cast("Frames", [part.bytes if len(part) < _LARGE else part.buffer for part in parts])


def send(socket: zmq.Socket[bytes], frames: Frames) -> bool:
    """Send; False when the queue is full. A ROUTER drops messages for an unknown identity."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NOW_AND_MORE, copy=len(frame) < _LARGE)
        socket.send(frames[-1], _NOW, copy=len(frames[-1]) < _LARGE)
    except zmq.Again:
        return False
    return True


def bytes_received(descriptor: int) -> int:
    """Over the TCP connection of this number since it was opened; 0 where the kernel does not count them: it does on Linux.

    Raises OSError when it is closed."""
    if not _HAS_COUNT:
        return 0
    # A `socket.socket` costs more than the look, and every connection is looked at ten times a second.
    connection = sockets.SocketType(sockets.AF_INET, sockets.SOCK_STREAM, 0, descriptor)
    try:
        information = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED.size)
    finally:
        connection.detach()  # it is ZeroMQ's
    return int(_BYTES_RECEIVED.unpack(information)[0]) if len(information) == _BYTES_RECEIVED.size else 0


class Waker:
    """Owns a pipe. Register `descriptor` for reading with a poller; `ring` from anywhere, `clear` when the poller saw it."""

    def __init__(self) -> None:
        self.descriptor, self._ringer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._ringer, False)

    def ring(self) -> None:
        """End a waiting poll, or the next one."""
        with suppress(BlockingIOError):  # a full pipe rings already
            os.write(self._ringer, b"w")

    def clear(self) -> None:
        """Forget that it rang; call it only when it did."""
        os.read(self.descriptor, 4096)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._ringer)
