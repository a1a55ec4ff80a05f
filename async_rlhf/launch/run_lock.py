"""The lock of a run directory, on its file `lock`, held as long as any process of the run lives.

owns        one descriptor, inherited by the roles that the holder starts: a dead supervisor's learner still holds it
waits for   `take`: processes of an earlier start, which end by themselves when their supervisor is gone
woken by    the clock, ten times a second
on close    the lock is free when the last process that inherited it has ended, however it ended

The lock is the kernel's (flock): no clock, no process number and no file decides who is alive. The file holds the host and the
process that took the lock, for messages; before that process is signalled, the kernel confirms that it holds the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import stat
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.launch.program import role_of

_LOOK_S = 0.1
_GRACE_S = 1.0  # for a holder that has just been killed
_MIN_BYTES, _MAX_BYTES = 256, 4096


@dataclass(frozen=True)
class LockHolder:
    """The process that took the lock."""

    host: str
    pid: int
    """Its number on its host."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class RunLock:
    """A lock that this process took or inherited; freed by `release`, or when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._content = descriptor, b""
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, path: Path, wait_s: float = 15.0) -> RunLock:
        """Waits up to `wait_s` for processes of an earlier start. Raises ConfigError naming the holder, and OSError."""
        began = time.monotonic()
        while True:
            descriptor = _open(path, os.O_RDWR | os.O_CREAT)
            lock = cls(descriptor)
            if _try(descriptor, fcntl.LOCK_EX) and _is(path, descriptor):
                this = {"host": socket.gethostname(), "pid": os.getpid(), "life": secrets.token_hex(8)}
                lock._content = json.dumps(this).encode().ljust(_MIN_BYTES)
                os.pwrite(descriptor, lock._content, 0)
                return lock
            lock.release()
            held_by, waited_s = holder(path), time.monotonic() - began
            lives = held_by is not None and (held_by.host != socket.gethostname() or _took(held_by.pid, path))
            if lives and waited_s >= _GRACE_S:
                raise ConfigError(
                    f"run {str(path.parent)!r} is running ({held_by}); stop it first: async-rlhf stop {path.parent}"
                )
            if waited_s >= wait_s:
                raise ConfigError(
                    f"processes of an earlier start still hold run {str(path.parent)!r} after {wait_s:.0f} s: {_left(path)}. "
                    "They end by themselves unless they are frozen; end them (kill -9 PROCESS) and try again"
                )
            time.sleep(_LOOK_S)

    def is_lost(self, path: Path) -> bool:
        """Whether another process has taken it since: a network file system frees the locks of a host that has been silent for
        a while, and one that is mounted with local locks lets every host take its own. Of a lock that was inherited: never."""
        with suppress(OSError, DamagedError):
            return self._content not in (b"", _content(path)) and holder(path) is not None
        return False

    def release(self) -> None:
        self._close()


def is_held(path: Path) -> bool:
    """Whether any process of a run lives. Raises OSError, and DamagedError for another kind of file."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder(path: Path) -> LockHolder | None:
    """The last holder, from the file; None when it cannot be read."""
    try:
        fields = json.loads(_content(path))
        host, pid = fields["host"], fields["pid"]
    except (OSError, DamagedError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return LockHolder(host[:255], pid) if isinstance(host, str) and type(pid) is int and 0 < pid < 1 << 31 else None


def signal_holder(path: Path, number: signal.Signals) -> LockHolder:
    """Signal the process that took the lock and still holds it. Raises ConfigError when none is certain."""
    run, held_by = str(path.parent), holder(path)
    if not is_held(path):
        raise ConfigError(f"run {run!r} is not running")
    if held_by is None:
        raise ConfigError(f"run {run!r} is running, and its lock does not say where: end its supervisor by hand (SIGTERM)")
    if held_by.host != socket.gethostname():
        raise ConfigError(f"run {run!r} is running on another host ({held_by}); stop it there")
    with suppress(ProcessLookupError):
        process = os.pidfd_open(held_by.pid)  # stays this process, though its number may be given to another later
        try:
            if _took(held_by.pid, path):
                signal.pidfd_send_signal(process, number)
                return held_by
        finally:
            os.close(process)
    raise ConfigError(f"run {run!r} has no supervisor that can be seen from here; processes that hold its lock: {_left(path)}")


def _content(path: Path) -> bytes:
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, _MAX_BYTES, 0)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """A regular file, or DamagedError; never waits for the other end of a pipe."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DamagedError(f"{path} is no regular file")
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the opened file: a failed start removes its file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _took(pid: int, path: Path) -> bool:
    """Whether this process of this host has the file open under a lock that it took itself (`/proc/PID/fdinfo` says so)."""
    with suppress(OSError):
        file = path.stat()
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file):
                    continue
                lines = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
                if any("FLOCK" in line and "WRITE" in line and str(pid) in line.split() for line in lines):
                    return True
    return False


def _left(path: Path) -> str:
    """The processes of this host that have the file open, with their commands."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and any(os.path.samefile(each, path) for each in (entry / "fd").iterdir()):
                role = role_of((entry / "cmdline").read_text(errors="replace").split("\0"))
                processes.append(f"{entry.name} ({role or 'another program'})")
    return ", ".join(processes) or "none that can be seen from here"
