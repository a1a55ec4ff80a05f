"""Worker processes: they end when the actor ends them, and never outlive it. For what no other process can import: threads.

A worker ignores the signals that a terminal or a scheduler sends to the process group: the actor ends it with SIGKILL,
together with every program the reward started. On Linux a guard stands between the two (`guard`),
which finds those programs wherever they went, and also when the actor was killed. Nothing here has a name in the file
system: what is killed leaves nothing behind.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import ctypes
import io
import logging
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Pipe, wait
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import TYPE_CHECKING, Any

from async_rlhf.actors.workers import guard
from async_rlhf.actors.workers.watchdog import GRACE_S, LoopWatchdog, RunningTurn
from async_rlhf.buffers.interpreter import python

if TYPE_CHECKING:
    from async_rlhf.actors.workers.sessions import SessionKind

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often to look at workers that have something to do."""
# Longest time a worker may take to import its user's code, models it loads at import included.
START_LIMIT_S = 300.0
# How long a process that was killed may be kept from the processor.
_END_S = 10.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GUARD_START_S = 60.0
# The exit code of a worker whose reward ran out of memory: its memory is freed, and the call fails with the reason.
OUT_OF_MEMORY = 112
_tracking = threading.Lock()


class WorkerProcess(SpawnProcess):
    """A fresh interpreter. Every way to end it is SIGKILL, for it and every process it started."""

    _start_method = None  # type: ignore[assignment]  # for its children: Python's default, or a user's choice

    if sys.platform == "linux":

        @staticmethod
        def _Popen(process_obj: Any) -> GuardedPopen:
            return GuardedPopen(process_obj)

    else:

        def terminate(self) -> None:
            self.kill()

        def kill(self) -> None:
            with contextlib.suppress(ProcessLookupError):
                if self.pid is not None and self.exitcode is None:
                    os.killpg(self.pid, signal.SIGKILL)
            # Before `obey_parent` has run there is no group of its own.
            super().kill()


def _tracker() -> int:
    """The descriptor of multiprocessing's resource tracker, which is begun as any Python process is (`interpreter`)."""
    with _tracking:
        flags = util._args_from_interpreter_flags  # type: ignore[attr-defined]
        util._args_from_interpreter_flags = lambda: python(*flags())[1:]  # type: ignore[attr-defined]
        try:
            tracker = resource_tracker.getfd()
        finally:
            util._args_from_interpreter_flags = flags  # type: ignore[attr-defined]
    assert tracker is not None
    return tracker


class GuardedPopen(popen_spawn_posix.Popen):
    """A worker behind its guard. `pid` is the worker's; what is waited for is the guard, which ends last and as it did.

    The pipe that brings the worker what it is to run stays open: when it closes, on purpose or with this process, the guard
    ends everything. Raises OSError when the guard does not come up.
    """

    _fds: list[int]  # the worker's descriptors

    def _launch(self, process_obj: Any) -> None:
        tracker = _tracker()
        # A worker first imports the program that runs here, which may define rewards. Those of ours do not.
        chosen = multiprocessing.get_start_method(allow_none=True)
        preparation = spawn.get_preparation_data(process_obj.name)
        multiprocessing.set_start_method(chosen, force=True)  # which asking has chosen
        del preparation["start_method"]
        if preparation.get("init_main_from_name", "").startswith("async_rlhf."):
            del preparation["init_main_from_name"]
        packed = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, packed)
            reduction.dump(process_obj, packed)
        finally:
            set_spawning_popen(None)
        life, own_life = os.pipe()
        self.sentinel, started = os.pipe()
        self._end = util.Finalize(self, os.close, (own_life,))
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
        _, *how = spawn.get_command_line(tracker_fd=tracker, pipe_handle=life)
        command = python("-I", "-S", guard.__file__, str(life), str(started), *python(*how))
        try:
            self._guard = util.spawnv_passfds(os.fsencode(command[0]), command, [*self._fds, tracker, life, started])
        finally:
            os.close(life)
            os.close(started)
        self.pid = self._read_pid()
        with open(own_life, "wb", closefd=False) as pipe:
            pipe.write(packed.getbuffer())

    def _read_pid(self) -> int:
        if wait([self.sentinel], _GUARD_START_S) and (pid := os.read(self.sentinel, 32)):
            return int(pid)
        os.kill(self._guard, signal.SIGKILL)
        os.waitpid(self._guard, 0)
        raise OSError(f"the guard of a worker process did not start within {_GUARD_START_S:.0f} s")

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(self._guard, flag)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def kill(self) -> None:
        self._end()

    terminate = kill

    def close(self) -> None:
        self._end()
        super().close()


class WorkerThread:
    """Replaces a `WorkerProcess` where the code is in this process only. It cannot be killed: it is left behind, and ends when
    its code returns, with its connection (the first argument)."""

    pid = None

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        self.exitcode: int | None = None
        self._target, self._args = target, args
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_wanted = True

    @property
    def is_stuck(self) -> bool:
        """Left behind, and not at its end."""
        return not self._is_wanted and self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def kill(self) -> None:
        self._is_wanted = False

    def join(self, timeout_s: float) -> None:
        """Nothing is waited for."""

    def is_alive(self) -> bool:
        return self._is_wanted and self._thread.is_alive()

    def _run(self) -> None:
        with self._args[0]:
            self._target(*self._args)


def end_worker(exit_code: int) -> None:
    """End this process at once, whatever runs in it, if it is a worker's; a thread goes on."""
    if isinstance(multiprocessing.current_process(), WorkerProcess):
        os._exit(exit_code)


def obey_parent(memory_mb: int | None) -> None:
    """To be called first in a worker: leave the actor's process group, ignore its signals, die when it dies.

    memory_mb: as `scoring.worker_memory_mb`. It bounds what the process may write to and shares with none (RLIMIT_DATA), of
    which nearly all is really used; address space (RLIMIT_AS) is reserved far beyond that by torch and CUDA. Linux only.
    Starts one daemon thread, which waits for the actor's death and for nothing else; so it has no deadline.
    """
    os.setsid()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        # Not SIG_IGN: programs that the reward starts would inherit it and be hard to stop.
        signal.signal(number, lambda *_: None)
    _as_before_in_children(before)
    # Into a pipe a print would wait for thousands of others, and be lost with a worker that is killed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if sys.platform == "linux":
        # The kernel's own promise, should the guard be killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if memory_mb is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()


def _as_before_in_children(handlers: Mapping[signal.Signals, Any]) -> None:
    """Lets forked children be terminated from their first moment, and end without waiting for threads they lack."""

    def begin() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        pool_threads.clear()
        release()

    pool_threads: Any = concurrent.futures.thread._threads_queues
    hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, handlers)
    release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, handlers)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin)


def _follow_parent() -> None:
    """Covers other systems, and a guard that died before the request to the kernel."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def is_over(process: SpawnProcess | WorkerThread, timeout_s: float) -> bool:
    """Waits that long for the end of a process that has been killed, or whose pipe has closed."""
    process.join(max(0.0, timeout_s))
    return not process.is_alive()


def ended(exit_code: int | None, memory_mb: int | None, setting: str) -> str:
    """Why a call failed whose worker process has ended. setting: where its limit is set."""
    limit = "" if memory_mb is None else f"limit {memory_mb} MB ({setting})"
    if exit_code == OUT_OF_MEMORY:
        return f"out of memory: {limit or 'the system gave no more'}"
    # Libraries in C abort where Python raises MemoryError.
    perhaps = f", perhaps out of memory: {limit}" if limit and exit_code in (-signal.SIGABRT, -signal.SIGSEGV) else ""
    return f"its worker process ended with exit code {exit_code}{perhaps}"


class PoolWorker:
    """One process and the parent's end of its connection.

    is_ready: it has loaded its user's code; failure: why it cannot, "" where no reason came. began: since when the first of its
    calls in order runs. ready_by, retired_until: as began in monotonic seconds, the latter None while it takes sessions.
    """

    def __init__(self, number: int, serve: Callable[..., None], kind: SessionKind) -> None:
        """serve: runs in it. Raises OSError where no process can be started."""
        self.number, self._kind = number, kind
        self.connection, theirs = Pipe()
        # Code that holds the interpreter lock keeps the process from reading; a send has a deadline.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        self.watchdog = LoopWatchdog()
        process: Callable[..., WorkerProcess | WorkerThread] = WorkerThread if kind.in_thread else WorkerProcess
        self.process = process(target=serve, args=(theirs, self.watchdog, kind), name="worker")
        try:
            self.process.start()
        except BaseException:  # an interrupt too: the pipe must not outlive a start that was given up
            self.connection.close()
            theirs.close()
            raise
        if not kind.in_thread:
            theirs.close()
        self.is_ready, self.failure = False, ""
        self.ready_by, self.began = time.monotonic() + START_LIMIT_S, 0.0
        self.retired_until: float | None = None
        self._seen: tuple[float, RunningTurn | None] = (0.0, None)
        self._looked, self._silent_s = time.monotonic(), 0.0

    @property
    def takes(self) -> bool:
        """Whether it gets new sessions."""
        return self.retired_until is None

    def running(self) -> int | None:
        """The session whose code is on the event loop right now, or was when the process died."""
        turn = self.watchdog.look()
        return None if turn is None else turn.id

    def causes(self) -> list[int] | None:
        """The same, as of `SessionBook.died`."""
        on_loop = self.running()
        return None if on_loop is None else [on_loop]

    def silent_s(self, now: float) -> float:
        """How long its loop has neither turned nor gone from one session to another. Only time in which this process could look
        itself counts."""
        seen = (self.watchdog.beaten, self.watchdog.look())
        self._silent_s = self._silent_s + min(now - self._looked, 2 * LOOK_S) if seen == self._seen else 0.0
        self._seen, self._looked = seen, now
        return self._silent_s

    def ended(self) -> str:
        """Why the process ended, which it has, or is about to."""
        is_over(self.process, _END_S)
        return self.failure or ended(self.process.exitcode, self._kind.memory_mb, self._kind.memory_setting)

    def end(self) -> None:
        """Kill it, and all it started."""
        self.process.kill()
        if not is_over(self.process, _END_S):
            logger.warning("worker process %s was killed and still runs after %g s", self.process.pid, _END_S)
        self.connection.close()
