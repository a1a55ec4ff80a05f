"""Agents that a command starts: ssh, Slurm's srun, kubectl exec, or a plain process of this machine.

    owns        for each channel a process of the command, its pipes, and a thread that keeps the end of its standard error
    waits for   nothing but bytes in `receive`, room in `send`
    woken by    the agent's bytes
    on close    the agent's input ends, and the agent with it; the command is killed when that takes long

The command runs in a session of its own: Ctrl-C at a terminal is for the supervisor.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

from async_rlhf.buffers.errors import WireError
from async_rlhf.launch.orders import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16
_WORDS_BYTES = 4096
_END_S = 5.0


class Pipe:
    """Frames over a pair of pipes: four bytes of length, most significant first, and as many bytes.

    Owns both descriptors. One thread receives and another may send. Raises OSError when the other side is gone, or reads
    nothing for as long as a `send` has patience; WireError for what is no frame.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        weakref.finalize(self, os.close, reads)
        self._end = weakref.finalize(self, os.close, writes)
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, frame: bytes, patience_s: float | None = None) -> None:
        """patience_s: how long it waits for room, where the descriptor is one that does not block."""
        with self._sending:
            if not self._end.alive:
                raise BrokenPipeError("it has been closed here")
            data = memoryview(_LENGTH.pack(len(frame)) + frame)
            while data:
                try:
                    data = data[os.write(self._writes, data) :]
                except BlockingIOError:
                    if not select.select([], [self._writes], [], patience_s)[1]:
                        raise ConnectionAbortedError("what it sends is not read") from None

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


class CommandHosts:
    """See `connection.Hosts`. command: with `{host}` where the name of a host belongs."""

    def __init__(self, names: Sequence[str], command: Sequence[str]) -> None:
        self.names = tuple(names)
        self.addresses = tuple(name.rpartition("@")[2] for name in names)
        self.here, self._command = socket.gethostname(), command

    def connect(self, name: str) -> CommandChannel:
        return CommandChannel([word.replace("{host}", name) for word in self._command])

    def close(self) -> None:
        """Nothing to close."""


class CommandChannel:
    """See `connection.Channel`. Raises OSError when the program cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._program = command[0]
        with self._process.stdout as events, self._process.stdin as orders:
            self._pipe = Pipe(os.dup(events.fileno()), os.dup(orders.fileno()))
        self._words = b""
        self._listener = threading.Thread(target=self._listen, name="agent-errors", daemon=True)
        self._listener.start()

    def send(self, frame: bytes) -> None:
        try:
            self._pipe.send(frame)
        except OSError as error:
            raise self._reason() from error

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            return self._pipe.receive(timeout_s)
        except OSError as error:
            raise self._reason() from error
        except WireError as error:
            raise WireError(f"its command may pass on nothing but the agent's output: {error}", error.reason) from error

    def close(self) -> None:
        if self._pipe.end(_END_S):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)  # the agent removes its files
        self._process.kill()
        self._process.wait()

    def _reason(self) -> ConnectionError:
        """The last line of the command, and how it ended."""
        try:
            code = self._process.wait(timeout=_END_S)
            self._listener.join(_END_S)
        except subprocess.TimeoutExpired:
            return ConnectionAbortedError(f"{self._program} has closed its output")
        lines = [line for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if line.startswith("fatal: ")), lines[-1] if lines else "no output")
        plain = "".join(each if each.isprintable() else "?" for each in last[:500])  # it comes from elsewhere
        return ConnectionAbortedError(f"its command ({self._program}) ended with code {code}: {plain}")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            while data := errors.read(_WORDS_BYTES):
                self._words = (self._words + data)[-_WORDS_BYTES:]
