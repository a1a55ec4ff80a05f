"""Starts nodes as processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch import affinity
from async_rlhf.launch.inventory import visible
from async_rlhf.launch.program import Node
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.launch.tether import environment

_KILL_S = 30.0
# Of a log's end; a role's reason is its last lines.
_LAST_BYTES = 1 << 16
# What a reason begins with: ours, and that of an exception in C++ that ends the process.
_FATAL = ("fatal: ", "  what():  ")


class LocalProcess:
    """A child process. The pipe to its standard input stays open while the supervisor lives; it ends when that closes.

    Owns the reading end of its beats; both are closed when its end has been seen.
    """

    def __init__(self, child: subprocess.Popen[bytes], beats: int, log: Path, log_bytes: int) -> None:
        os.set_blocking(beats, False)
        self._child, self._log, self._log_bytes = child, log, log_bytes
        self._beats = os.fdopen(beats, "rb", buffering=0)

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        code = self._child.poll()
        if code is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._beats.close()
        return code

    def heard(self) -> bytes:
        try:
            return self._beats.read(1 << 16) or b""
        except ValueError:  # closed: its end has been seen, perhaps by another thread just now
            return b""

    def last_words(self) -> str:
        with suppress(OSError), self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = self._log_bytes if self._log_bytes <= size else 0  # else it was cut
            file.seek(max(begin, size - _LAST_BYTES))
            lines = [line for line in file.read(_LAST_BYTES).decode(errors="replace").splitlines() if line.strip()]
            fatal = (line.removeprefix(word) for word in _FATAL for line in reversed(lines) if line.startswith(word))
            return next(fatal, lines[-1] if lines else "")
        return ""

    def kill(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel does not let go of it: `poll` will say when
            self._child.wait(timeout=_KILL_S)
        self.poll()


class LocalLauncher:
    """See `program.Launcher`. lock: of the run directory; what is started here keeps it until it ends."""

    def __init__(self, lock: RunLock | None = None) -> None:
        self._lock = lock

    def agents(self) -> Mapping[str, Callable[[], None]]:
        return {}

    def close(self) -> None:
        """It holds nothing."""

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        lock = None if self._lock is None else self._lock.descriptor
        command = [sys.executable, "-P", "-m", "async_rlhf.run.roles", node.role, str(run_dir), *node.arguments]
        with node.log.open("ab") as log:
            begin = log.tell()  # before the child shares, and moves, this file's position
            hears, beats = os.pipe()
            variables = {
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "PYTHONHASHSEED": "0",  # what draws from sets, a reward for one, does so alike in every life
                "HF_HUB_OFFLINE": "1",  # models are local directories by now: a role fetches nothing
                "TOKENIZERS_PARALLELISM": "false",
                "TQDM_DISABLE": "1",  # bars of libraries do not belong into a log
                **visible(node.devices, os.environ),
                **affinity.environment(node.threads),
                **environment(beats, lock),
            }
            try:
                with affinity.held_to(node.cpus):
                    child = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=variables,
                        pass_fds=(beats,) if lock is None else (beats, lock),
                    )
            except (OSError, ConfigError):
                os.close(hears)
                raise
            finally:
                os.close(beats)
            return LocalProcess(child, hears, node.log, begin)
