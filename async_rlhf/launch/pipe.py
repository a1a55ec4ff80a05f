"""Frames over a pair of pipes: four bytes of length, most significant first, and as many bytes.

    owns        both descriptors
    waits for   bytes: `receive` for a second at most; room: `send` until the other side has read
    woken by    the kernel
    on close    `end`: nothing is sent any more, the other side reads the end; the rest is closed when nothing refers to it

One thread receives and another may send. Nothing of a frame is looked at here.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import weakref

from async_rlhf.buffers.errors import WireError
from async_rlhf.launch.orders import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class Pipe:
    """Raises OSError when the other side is gone, WireError for what is no frame."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        weakref.finalize(self, os.close, reads)
        self._end = weakref.finalize(self, os.close, writes)
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        with self._sending:
            if not self._end.alive:
                raise BrokenPipeError("it has been closed here")
            data = memoryview(_LENGTH.pack(len(frame)) + frame)
            while data:
                data = data[os.write(self._writes, data) :]

    def end(self, timeout_s: float) -> bool:
        """Whether the other side reads the end; not when a `send` waits for room longer than this."""
        if not self._sending.acquire(timeout=timeout_s):
            return False
        self._end()
        self._sending.release()
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame; None when it is not whole within this time."""
        while (frame := self._take()) is None:
            if not select.select([self._reads], [], [], timeout_s)[0]:
                return None
            if not (data := os.read(self._reads, _READ_BYTES)):
                raise ConnectionResetError("the other side has closed the connection")
            self._buffer += data
        return frame

    def _take(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise WireError(
                f"a frame of {length} bytes is announced; the limit is {MAX_FRAME_BYTES}. It is {bytes(self._buffer[:50])!r}",
                "oversized",
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame
