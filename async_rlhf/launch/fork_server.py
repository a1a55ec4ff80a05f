"""A process that has imported what roles compute with and computes nothing; roles are forked from it instead of begun anew.

owns        one thread and one end of a socket: no device, no lock, no log
waits for   requests, `_IDLE_S` at most: then it ends, and the next request begins another server
woken by    a request, the end of the process that began it
on close    what it has forked goes on: those are children of the process that asked, as if that had started them itself

Imports of torch and transformers take a role three seconds, a fork takes hundredths of one. A role is forked twice: its parent
ends at once, and Linux gives the orphan to the process that asked, which has declared itself its subreaper for that moment. So
exit codes, signals and the order of deaths are those of a child, and the death of a server ends nothing and loses nothing.

What a process inherits a role gets from its supervisor, not from the server: the folder, limits, CPUs, umask, standard streams,
and the variables, which must be those that the server has imported with (but for `READ_LATE`).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import hashlib
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from setproctitle import setproctitle

from async_rlhf.launch.program import title

_INHERITED = "ASYNC_RLHF_FORK_SERVER"
READ_LATE = {"CUDA_VISIBLE_DEVICES", "ASYNC_RLHF_TETHER", _INHERITED, "PYTEST_CURRENT_TEST"}
"""Variables that nothing reads while it is imported: a role may have others than its server."""

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_START_S = 120.0  # imports on a slow machine
_IDLE_S = 600.0
_END_S = 30.0
_HEADER = struct.Struct("<I")
_MAX_BYTES = 1 << 24  # variables and arguments
_MAX_DESCRIPTORS = 8
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


class ForkedProcess:
    """A child that was forked by a server; what `subprocess.Popen` offers of a child, for those that use one or the other.

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


class ForkServer:
    """The asking end. variables: a digest of those that it has imported with."""

    def __init__(self, source: socket.socket, process: subprocess.Popen[bytes] | ForkedProcess, variables: str) -> None:
        source.settimeout(_START_S)
        self._socket, self.process, self.variables = source, process, variables

    @classmethod
    def begin(cls, preload: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        """It begins at once and imports `preload`; it ends with this process, or when it was idle."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "async_rlhf.launch.fork_server", str(theirs.fileno()), *preload]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(variables),
                pass_fds=(theirs.fileno(),),
            )
        return cls(ours, process, _digest(variables))

    @classmethod
    def inherited(cls) -> ForkServer | None:
        """The one that came with this process (`exec_with_server`)."""
        if (told := os.environ.pop(_INHERITED, None)) is None:
            return None
        descriptor, pid, variables = told.split()
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
        cpus: Collection[int] | None = None,
        cwd: str = ".",
    ) -> int:
        """The process number of a child of this process that runs `entry`, a `module:function` of the arguments that returns
        an exit code.

        descriptors: its 0, 1, 2, 3, ... cpus: those it may use, as the machine numbers them; None: as this thread. Waits until
        the server has imported. Raises OSError when it cannot be forked, ConnectionError when the server has ended.
        """
        umask = os.umask(0)
        os.umask(umask)
        request = json.dumps(
            {
                "entry": entry,
                "arguments": list(arguments),
                "variables": dict(variables),
                "umask": umask,
                "limits": [resource.getrlimit(each) for each in _LIMITS],
                "cpus": sorted(os.sched_getaffinity(0) if cpus is None else cpus),
            }
        ).encode()
        folder = os.open(cwd, os.O_PATH | os.O_DIRECTORY)
        try:
            with _adopting_orphans():
                socket.send_fds(self._socket, [_HEADER.pack(len(request))], [folder, *descriptors])
                self._socket.sendall(request)
                answer = json.loads(_exactly(self._socket, _HEADER.unpack(_exactly(self._socket, _HEADER.size))[0]))
        except TimeoutError as error:
            self.close()
            raise OSError(f"the fork server has not answered for {_START_S:.0f} s") from error
        finally:
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


_servers: list[ForkServer] = []
_asking = threading.RLock()


@atexit.register
def _close() -> None:
    while _servers:
        _servers.pop().close()


def warm(preload: Sequence[str], variables: Mapping[str, str]) -> ForkServer | None:
    """The server of this process with these variables, begun if there is none; what asks for it need not wait for it.

    None where orphans cannot be adopted (not Linux), and with ASYNC_RLHF_FORK_SERVER=off: every role then imports for itself. A
    server with other variables ends: a program has one at a time.
    """
    if sys.platform != "linux" or os.environ.get(_INHERITED) == "off":
        return None
    with _asking:
        if inherited := ForkServer.inherited():
            _servers.append(inherited)
        for server in list(_servers):
            if server.is_there and server.variables == _digest(variables):
                return server
            _servers.remove(server)
            server.close()
        _servers.append(ForkServer.begin(preload, variables))
        return _servers[0]


def fork(preload: Sequence[str], variables: Mapping[str, str], ask: Callable[[ForkServer], int]) -> int | None:
    """What a server with these variables is asked for, also where it has just ended; None where there can be none.

    Raises OSError.
    """
    with _asking:
        for last in (False, True):
            if (server := warm(preload, variables)) is None:
                return None
            try:
                return ask(server)
            except ConnectionError as error:
                server.close()
                if last:
                    raise OSError(f"the fork server ends while it begins: {error}") from error
    raise AssertionError


def _digest(variables: Mapping[str, str]) -> str:
    fixed = sorted((name, value) for name, value in variables.items() if name not in READ_LATE)
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()


def _is_child(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Meanwhile what loses its parent below this process becomes its child. Afterwards it is as it was: a program that trains
    is not made to reap what its other children leave."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _exactly(source: socket.socket, count: int) -> bytes:
    """Raises ConnectionError at the end of what comes."""
    if count > _MAX_BYTES:
        raise ConnectionError(f"a message of {count} bytes")
    data = b""
    while len(data) < count:
        if not (piece := source.recv(count - len(data))):
            raise ConnectionResetError("it has ended")
        data += piece
    return data


# -- in the server ---------------------------------------------------------------------------------------------------

_imported_with = dict(os.environ)


def main(arguments: Sequence[str]) -> int:
    """Import, then fork at request until there is nobody to ask."""
    setproctitle(title(["fork_server"]))  # also finds where a title is kept, which a role does not once its variables change
    _ignore_terminal()
    source = socket.socket(fileno=int(arguments[0]))
    source.set_inheritable(False)
    source.settimeout(None)
    gc.disable()
    for module in arguments[1:]:
        import_module(module)
    gc.freeze()  # what is imported stays: no collector touches it, here or in a role, so that its memory is shared
    _serve(source)
    return 0


def _ignore_terminal() -> None:
    """It ends with the process that began it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _serve(source: socket.socket) -> None:
    source.settimeout(_IDLE_S)
    with suppress(ConnectionError, TimeoutError):
        while True:
            _answer(source)


def _answer(source: socket.socket) -> None:
    header, descriptors, _, _ = socket.recv_fds(source, _HEADER.size, _MAX_DESCRIPTORS)
    if len(header) < _HEADER.size:
        raise ConnectionResetError
    request = json.loads(_exactly(source, _HEADER.unpack(header)[0]))
    tells, hears = os.pipe()
    try:
        between = os.fork()
        if not between:
            _leave_an_orphan(source, request, descriptors, hears)
        os.waitpid(between, 0)  # now the orphan has its new parent
        os.close(hears)
        hears = -1
        told = os.read(tells, 4096)
        answer = {"pid": int(told)} if told.isdigit() else {"error": told.decode(errors="replace") or "it ended at once"}
    except OSError as error:
        answer = {"error": f"it cannot be forked: {error}"}
    finally:
        for descriptor in (tells, hears, *descriptors):
            if descriptor >= 0:
                os.close(descriptor)
    packed = json.dumps(answer).encode()
    source.sendall(_HEADER.pack(len(packed)) + packed)


def _leave_an_orphan(source: socket.socket, request: dict[str, Any], descriptors: list[int], tell: int) -> NoReturn:
    try:
        pid = os.fork()
    except OSError as error:
        os.write(tell, f"it cannot be forked: {error}".encode())
        os._exit(1)
    if pid:
        os.write(tell, b"%d" % pid)
        os._exit(0)
    code = 1
    try:
        os.close(tell)
        source.close()
        _inherit(request, descriptors)
        module, function = request["entry"].split(":")
        sys.argv = [module, *request["arguments"]]
        gc.enable()
        code = getattr(import_module(module), function)(request["arguments"])
    except BaseException:  # noqa: BLE001  this process goes no further up than here
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code)  # threads of libraries must not keep a process that has done its work


def _inherit(request: dict[str, Any], descriptors: list[int]) -> None:
    """What a started process would have from the one that started it."""
    folder, *streams = descriptors
    os.fchdir(folder)
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, len(streams)) for each in streams]  # so that none is overwritten
    for target, each in enumerate(above):
        os.dup2(each, target, inheritable=True)
    os.closerange(len(streams), max(above) + 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    for which, (soft, hard) in zip(_LIMITS, request["limits"], strict=True):
        if resource.getrlimit(which) != (soft, hard):
            resource.setrlimit(which, (soft, hard))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all roles would draw the same


def exec_with_server(command: list[str]) -> NoReturn:
    """An entry: this process becomes the command, in a session of its own, with a server of its own that has imported already
    (`ForkServer.inherited`)."""
    os.setsid()
    ours, theirs = socket.socketpair()
    variables = dict(os.environ)
    if not (server := os.fork()):
        os.environ.clear()
        os.environ.update(_imported_with)
        kept = theirs.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, ours.fileno() + 1)
        for target in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), target)
        _ignore_terminal()
        _serve(theirs)
        os._exit(0)
    ours.set_inheritable(True)
    os.execvpe(command[0], command, {**variables, _INHERITED: f"{ours.fileno()} {server} {_digest(_imported_with)}"})


if __name__ == "__main__":
    # A second copy of this module would be another server's.
    sys.exit(import_module("async_rlhf.launch.fork_server").main(sys.argv[1:]))
