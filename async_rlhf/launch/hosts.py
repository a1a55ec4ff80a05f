"""Agents that a command starts: ssh, Slurm's srun, kubectl exec, or a plain process of this machine.

    owns        for each channel a process of the command, and a thread that keeps the end of its standard error
    waits for   nothing but in `receive`
    woken by    the agent's bytes
    on close    the agent's input ends, and the agent with it; the command is killed when that takes long

The command runs in a session of its own: Ctrl-C at a terminal is for the supervisor to hear.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from async_rlhf.buffers.errors import WireError
from async_rlhf.launch.pipe import Pipe

_WORDS_BYTES = 4096
_END_S = 5.0


class CommandHosts:
    """See `connection.Hosts`. command: with `{host}` where the name of a host belongs."""

    def __init__(self, names: Sequence[str], command: Sequence[str]) -> None:
        self._names, self._command = tuple(names), tuple(command)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def present(self) -> tuple[str, ...]:
        return self._names

    @property
    def here(self) -> str:
        return socket.gethostname()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(name.rpartition("@")[2] for name in self._names)

    def connect(self, name: str, timeout_s: float) -> CommandChannel:
        return CommandChannel([word.replace("{host}", name) for word in self._command])

    def close(self) -> None:
        """It holds nothing."""


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
                self._process.wait(_END_S)  # the agent removes what it has on its disk
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
        said = next((line for line in reversed(lines) if line.startswith("fatal: ")), lines[-1] if lines else "no output")
        plain = "".join(each if each.isprintable() else "?" for each in said[:500])  # it comes from elsewhere
        return ConnectionAbortedError(f"its command ({self._program}) ended with code {code}: {plain}")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            while data := errors.read(_WORDS_BYTES):
                self._words = (self._words + data)[-_WORDS_BYTES:]
