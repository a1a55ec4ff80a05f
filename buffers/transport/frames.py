"""Messages of several frames in and out of a ZeroMQ socket, without waiting. Large frames are handed over, not copied.

A frame that was received by reference keeps its message alive; one that is sent by reference must not change any more.
"""

from __future__ import annotations

from typing import cast

import zmq

from buffers.protocol.wire import Frames

# Flags as plain integers: combining those of an enumeration costs more than sending a small frame.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Handing a frame over by reference costs about as much as copying so many bytes.
_LARGE = 1 << 16


def receive(socket: zmq.Socket[bytes]) -> Frames | None:
    """The next message, or None when there is none."""
    parts = _receive(socket)
    return None if parts is None else _data(parts)


def receive_from(socket: zmq.Socket[bytes], *, has_keys: bool) -> tuple[Frames, int, str] | None:
    """As `receive`, with the descriptor of the connection it came over, and the name that the sender's key was let in under."""
    parts = _receive(socket)
    if parts is None:
        return None
    return _data(parts), int(parts[0].get(zmq.SRCFD)), str(parts[0].get("User-Id")) if has_keys else ""


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
    """False when so much waits already that the message does not fit; a ROUTER drops what is for nobody."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NOW_AND_MORE, copy=len(frame) < _LARGE)
        socket.send(frames[-1], _NOW, copy=len(frames[-1]) < _LARGE)
    except zmq.Again:
        return False
    return True
