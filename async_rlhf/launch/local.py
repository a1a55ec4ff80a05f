"""Starts nodes as processes of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.interpreter import python
from async_rlhf.launch import forked, machine
from async_rlhf.launch.forked import Child, ForkedProcess
from async_rlhf.launch.program import Launcher, Node
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.launch.sockets import socket_root
from async_rlhf.launch.tether import environment

_KILL_S = 30.0
# Of a log's end; a role's reason is its last lines.
_LAST_BYTES = 1 << 16
# Beginnings of a reason in a log: ours, and that of a C++ exception that ends the process.
_FATAL = ("fatal: ", "  what():  ")
_ROLES = "async_rlhf.run.processes.roles"
# Roles that compute: their imports take seconds, and are made once for all of them.
_FORKED = {"learner", "learner_rank", "actor", "scorer", "evaluation"}
_IMPORTED_ONCE = (
    _ROLES,
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "async_rlhf.learner.loop.trainer",
    "async_rlhf.learner.step.torch_machine",
    "async_rlhf.actors.loop.worker",
    "async_rlhf.actors.loop.evaluation",
    "async_rlhf.actors.torch_engine.loading",
    "async_rlhf.actors.scoring.pool",
)


class LocalProcess:
    """A child process. The pipe to its standard input stays open while the supervisor lives; it ends when that closes.

    Owns the reading end of its beats; both are closed when its end has been seen.
    """

    def __init__(self, child: Child, beats: int, log: Path, log_bytes: int) -> None:
        os.set_blocking(beats, False)
        self.pid, self._child, self._log, self._log_bytes = child.pid, child, log, log_bytes
        self._beats = os.fdopen(beats, "rb", buffering=0)

    def poll(self) -> int | None:
        code = self._child.poll()
        if code is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._beats.close()
        return code

    def read_beats(self) -> bytes:
        try:
            return self._beats.read(1 << 16) or b""
        except ValueError:  # closed: its end has been seen, perhaps by another thread just now
            return b""

    def failure_message(self) -> str:
        with suppress(OSError):
            return last_error(self._log, _FATAL, self._log_bytes)
        return ""

    def kill(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel still holds it: `poll` reports its end
            self._child.wait(timeout=_KILL_S)
        self.poll()


class LocalLauncher(Launcher):
    """See `Launcher`. lock: of the run directory; processes started here keep it until they end. variables: more."""

    def __init__(self, lock: RunLock | None = None, variables: Mapping[str, str] | None = None) -> None:
        self._lock, self._variables = lock, {} if variables is None else variables  # which may be added to later

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        arguments = [node.role, str(run_dir), *node.arguments]
        seen = machine.visible(node.devices, os.environ) | machine.with_threads(node.threads)
        variables = {**role_variables(), **self._variables, **seen}
        with node.log.open("ab") as log, ExitStack() as ours:
            begin = log.tell()  # before the child shares, and moves, this file's position
            reads, beats = os.pipe()
            ours.callback(os.close, beats)
            held = [] if self._lock is None else [self._lock.descriptor]
            try:
                given = (node, arguments, variables, log.fileno(), [beats, *held])
                child = self._forked(*given) or self._begun(*given)
            except (OSError, ConfigError):
                os.close(reads)
                raise
            return LocalProcess(child, reads, node.log, begin)

    def _forked(
        self, node: Node, arguments: list[str], variables: dict[str, str], log: int, passed: list[int]
    ) -> ForkedProcess | None:
        """Fork a role by the fork server; None for a role that computes nothing, or has its own threads or CPUs."""
        if node.role not in _FORKED or (node.threads, node.cpus) != (None, None):
            return None
        variables = variables | environment(*range(3, 3 + len(passed)))
        reads, writes = os.pipe()
        pid = None
        try:
            streams = (reads, log, log, *passed)
            pid = forked.fork(
                _IMPORTED_ONCE, variables, lambda server: server.fork(f"{_ROLES}:main", arguments, variables, streams)
            )
        finally:
            os.close(reads)
            if pid is None:
                os.close(writes)
        return None if pid is None else ForkedProcess(pid, writes)

    def _begun(
        self, node: Node, arguments: list[str], variables: dict[str, str], log: int, passed: list[int]
    ) -> subprocess.Popen[bytes]:
        with machine.held_to(node.cpus):
            return subprocess.Popen(
                python("-m", _ROLES, *arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables | environment(*passed),
                pass_fds=passed,
            )


def last_error(log: Path, words: Sequence[str], begin: int = 0) -> str:
    """The last line that begins with the first of `words` that occurs, without that word; else the last line. begin: of
    the lines that count, unless the file was cut since. Raises OSError."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin if begin <= size else 0, size - _LAST_BYTES))
        lines = [line for line in file.read(_LAST_BYTES).decode(errors="replace").splitlines() if line.strip()]
    reasons = (line.removeprefix(word) for word in words for line in reversed(lines) if line.startswith(word))
    return next(reasons, lines[-1] if lines else "")


def warm() -> None:
    """Begin the fork server of this machine's roles, so that the first role waits less for it."""
    forked.warm(_IMPORTED_ONCE, role_variables())


def begin(command: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int], cwd: str) -> Child:
    """Start a program of this machine that will start roles, in a session of its own, with a fork server for them.

    descriptors: its 0, 1, 2, 3, ...; it inherits no other. Raises OSError.
    """
    entry, held = "async_rlhf.launch.fork_server:exec_with_server", descriptors[3:]
    pid = forked.fork(
        _IMPORTED_ONCE, role_variables(), lambda server: server.fork(entry, command, variables, descriptors, cwd=cwd)
    )
    if pid is not None:
        return ForkedProcess(pid)
    stdin, stdout, stderr = descriptors[:3]
    return subprocess.Popen(
        command, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, pass_fds=held, start_new_session=True
    )


def role_variables() -> dict[str, str]:
    """Environment variables of every role: those of this process, and settings of libraries."""
    return {
        "VLLM_RPC_BASE_PATH": str(socket_root()),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # files and logs are UTF-8, whatever the locale of the host is
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "PYTHONHASHSEED": "0",  # code that iterates over sets, such as a reward, does so alike in every life
        "HF_HUB_OFFLINE": "1",  # models are local directories by now: a role fetches nothing
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # bars of libraries do not belong into a log
    }
