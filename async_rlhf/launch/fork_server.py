"""A process that has imported what roles compute with and computes nothing; roles are forked from it instead of begun anew.

owns        one thread and one end of a socket: no device, no lock, no log
waits for   requests
woken by    a request, the end of the process that began it, with which it ends
on close    what it has forked goes on: those are children of the process that asked, as if that had started them itself

Imports of torch and transformers take a role three seconds, a fork takes hundredths of one. A role is forked twice: its parent
ends at once, and Linux gives the orphan to the process that asked, which has declared itself its subreaper for that moment. So
exit codes, signals and the order of deaths are those of a child, and the death of a server ends nothing and loses nothing.

What a process inherits a role gets from its supervisor, not from the server: the folder, limits, CPUs, umask, standard streams,
and the variables, which must be those that the server has imported with (but for `READ_LATE`).
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from setproctitle import setproctitle

from async_rlhf.launch.exit_codes import end_with
from async_rlhf.launch.program import title

INHERITED = "ASYNC_RLHF_FORK_SERVER"
"""Names the inherited server of a program (`exec_with_server`): process, descriptor, server, digest of variables."""
_CALLER = {"ASYNC_RLHF_CALLER_REWARDS", "ASYNC_RLHF_CALLER_ENVIRONMENT"}
READ_LATE = {"CUDA_VISIBLE_DEVICES", "ASYNC_RLHF_TETHER", INHERITED, "PYTEST_CURRENT_TEST", *_CALLER}
"""Variables that nothing reads while it is imported: a role may have others than its server."""
HEADER = struct.Struct("<I")
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_MAX_BYTES = 1 << 24  # variables and arguments
_MAX_DESCRIPTORS = 8
_imported_with = dict(os.environ)


def digest(variables: Mapping[str, str]) -> str:
    fixed = sorted((name, value) for name, value in variables.items() if name not in READ_LATE)
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()


def exactly(source: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes. Raises ConnectionError at the end of the stream."""
    if count > _MAX_BYTES:
        raise ConnectionError(f"a message of {count} bytes")
    data = b""
    while len(data) < count:
        if not (piece := source.recv(count - len(data))):
            raise ConnectionResetError("it has ended")
        data += piece
    return data


def main(arguments: Sequence[str]) -> int:
    """arguments: its end of the socket, and the modules to import."""
    setproctitle(title(["fork_server"]))  # also finds where a title is kept, which a role does not once its variables change
    _ignore_terminal()
    source = socket.socket(fileno=int(arguments[0]))
    source.set_inheritable(False)
    source.settimeout(None)
    # numpy would start threads where it is imported, which no fork has; roles multiply their matrices with torch.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    for module in arguments[1:]:
        import_module(module)
    gc.freeze()  # no collector touches imported objects, here or in a role, so that their memory stays shared
    _serve(source)
    return 0


def _ignore_terminal() -> None:
    """Ignore a terminal's signals: the server ends with the process that began it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _serve(source: socket.socket) -> None:
    with suppress(ConnectionError):
        while True:
            _answer(source)


def _answer(source: socket.socket) -> None:
    header, descriptors, _, _ = socket.recv_fds(source, HEADER.size, _MAX_DESCRIPTORS)
    if len(header) < HEADER.size:
        raise ConnectionResetError
    request = json.loads(exactly(source, HEADER.unpack(header)[0]))
    reads, writes = os.pipe()
    try:
        try:
            if not (between := os.fork()):
                _leave_an_orphan(source, request, descriptors, writes)
            os.waitpid(between, 0)  # now the orphan has its new parent
        finally:
            os.close(writes)
        written = os.read(reads, 4096)  # the orphan's process number, or the error
        answer = {"pid": int(written)} if written.isdigit() else {"error": written.decode() or "its first parent was killed"}
    except OSError as error:
        answer = {"error": f"it cannot be forked: {error}"}
    finally:
        for descriptor in (reads, *descriptors):
            os.close(descriptor)
    packed = json.dumps(answer).encode()
    source.sendall(HEADER.pack(len(packed)) + packed)


def _leave_an_orphan(source: socket.socket, request: dict[str, Any], descriptors: list[int], writes: int) -> NoReturn:
    try:
        pid = os.fork()
    except OSError as error:
        os.write(writes, f"it cannot be forked: {error}".encode())
        os._exit(1)
    if pid:
        os.write(writes, b"%d" % pid)
        os._exit(0)

    def work() -> int:
        os.close(writes)
        source.close()
        _inherit(request, descriptors)
        module, function = request["entry"].split(":")
        sys.argv = [module, *request["arguments"]]
        gc.enable()
        code: int = getattr(import_module(module), function)(request["arguments"])
        return code

    end_with(work)


def _inherit(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over the requester's directory, streams, variables, umask, CPUs and limits, as a child of it would."""
    folder, *streams = descriptors
    os.fchdir(folder)
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, len(streams)) for each in streams]  # so that none is overwritten
    for target, descriptor in enumerate(above):
        os.dup2(descriptor, target, inheritable=True)
    os.closerange(len(streams), max(above) + 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    for which, (soft, hard) in zip(LIMITS, request["limits"], strict=True):
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
    inherited = f"{os.getpid()} {ours.fileno()} {server} {digest(_imported_with)}"
    os.execvpe(command[0], command, {**variables, INHERITED: inherited})


if __name__ == "__main__":
    # A second copy of this module would be another server's.
    sys.exit(import_module("async_rlhf.launch.fork_server").main(sys.argv[1:]))
