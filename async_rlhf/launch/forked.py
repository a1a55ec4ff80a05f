"""The asking end of a fork server: children of this process that are forked elsewhere.

owns        one server a process, begun where it is first wanted; its end of the socket
waits for   the server's imports, at the first request; `_START_S` at most
woken by    the server's answer
on close    the server ends, and what it has forked goes on
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.fork_server import HEADER, INHERITED, LIMITS, digest, exactly

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_START_S = 600.0  # imports from a cold network disk
_END_S = 30.0


class ForkedProcess:
    """A child that was forked by a server, with the interface of `subprocess.Popen` that callers use.

    stdin: the writing end of its standard input, where it has one.
    """

    def __init__(self, pid: int, stdin: int | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None if stdin is None else os.fdopen(stdin, "wb", buffering=0)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Exit code, or None while it runs; negative is the signal that ended it."""
        with self._reaping:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
                except ChildProcessError:  # the program around has waited for any child of its own
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def kill(self) -> None:
        with self._reaping, suppress(ProcessLookupError):
            if self.returncode is None:  # else its number may be another's by now
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 30.0) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.002)
        return code


Child = subprocess.Popen[bytes] | ForkedProcess


class ForkServer:
    """The asking end. variables: a digest of those that it has imported with."""

    def __init__(self, source: socket.socket, process: Child, variables: str) -> None:
        source.settimeout(_START_S)
        self._socket, self.process, self.variables = source, process, variables

    @classmethod
    def begin(cls, preload: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        """Begin a server, which imports `preload` at once and ends with this process."""
        ours, theirs = socket.socketpair()
        command = python("-m", "async_rlhf.launch.fork_server", str(theirs.fileno()), *preload)
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(variables),
                pass_fds=(theirs.fileno(),),
            )
        return cls(ours, process, digest(variables))

    @classmethod
    def inherited(cls) -> ForkServer | None:
        """The one that came with this process (`exec_with_server`), and not with one above it."""
        owner, *server = os.environ.pop(INHERITED, "").split() or [""]
        if owner != str(os.getpid()):
            return None
        descriptor, pid, variables = server
        return cls(socket.socket(fileno=int(descriptor)), ForkedProcess(int(pid)), variables)

    @property
    def is_there(self) -> bool:
        return self.process.poll() is None

    def fork(
        self,
        entry: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        descriptors: Sequence[int],
        cwd: str = ".",
    ) -> int:
        """The process number of a child of this process that runs `entry`, a `module:function` of the arguments that returns
        an exit code.

        descriptors: its 0, 1, 2, 3, ... Waits until the server has imported. Raises OSError when it cannot be forked,
        ConnectionError when the server has ended.
        """
        request = json.dumps(
            {
                "entry": entry,
                "arguments": list(arguments),
                "variables": dict(variables),
                "umask": umask(),
                "limits": [resource.getrlimit(each) for each in LIMITS],
                "cpus": sorted(os.sched_getaffinity(0)),
            }
        ).encode()
        folder = os.open(cwd, os.O_PATH | os.O_DIRECTORY)
        adopted = adopt_orphans()  # only for the moment: the calling program need not reap orphans of its other children
        try:
            socket.send_fds(self._socket, [HEADER.pack(len(request))], [folder, *descriptors])
            self._socket.sendall(request)
            answer = json.loads(exactly(self._socket, HEADER.unpack(exactly(self._socket, HEADER.size))[0]))
        except TimeoutError as error:
            self.close()
            raise OSError(f"the fork server has not answered for {_START_S:.0f} s") from error
        finally:
            adopt_orphans(adopted)
            os.close(folder)
        if "error" in answer:
            raise OSError(answer["error"])
        if not _is_child(answer["pid"]):
            raise OSError("this system does not give the orphans of a process to its subreaper")
        return int(answer["pid"])

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait(timeout=_END_S)


_server: ForkServer | None = None
_lock = threading.RLock()


@atexit.register
def _close() -> None:
    global _server
    if _server is not None:
        _server.close()
    _server = None


def _forget() -> None:
    """Called in a process that the calling program forks: the server is its parent's."""
    global _server, _lock
    _server, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)


def warm(preload: Sequence[str], variables: Mapping[str, str]) -> ForkServer | None:
    """The server of this process with these variables, begun if there is none; what asks for it need not wait for it.

    None where orphans cannot be adopted (not Linux), and with ASYNC_RLHF_FORK_SERVER=off: every role then imports for itself. A
    server with other variables ends: a program has one at a time.
    """
    if sys.platform != "linux" or os.environ.get(INHERITED) == "off":
        return None
    global _server
    with _lock:
        _server = ForkServer.inherited() or _server
        if _server is not None and not (_server.is_there and _server.variables == digest(variables)):
            _close()
        _server = _server or ForkServer.begin(preload, variables)
        return _server


def fork(preload: Sequence[str], variables: Mapping[str, str], request: Callable[[ForkServer], int]) -> int | None:
    """The result of `request` to a server with these variables, started again if it has just ended. None where there can be no
    server, or it ends while it imports: the caller then imports for itself, and its log has the reason. Raises OSError."""
    with _lock:
        for _ in range(2):
            if (server := warm(preload, variables)) is None:
                break
            try:
                return request(server)
            except ConnectionError:
                server.close()
    return None


def umask() -> int:
    """The umask of this process, read without changing it: another thread may be making a file."""
    return int(re.search(r"^Umask:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1], 8)  # type: ignore[index]


def _is_child(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def adopt_orphans(wanted: bool = True) -> bool:
    """Set whether descendants whose parent ends become children of this process. Returns the previous setting.

    Linux only; elsewhere it does nothing.
    """
    before = ctypes.c_int()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)
