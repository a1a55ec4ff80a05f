"""Processes that end when they are told to, and never outlive the actor. Used for every worker that runs a reward.

A worker ignores the signals that a terminal or a scheduler sends to everybody: the actor decides when it ends, and ends
it with SIGKILL, together with whatever programs the reward started.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerProcess(SpawnProcess):
    """A fresh interpreter that is ended with SIGKILL, whichever way it is asked to end."""

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        """End the worker and every process it started."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid is not None and self.exitcode is None:
                os.killpg(self.pid, signal.SIGKILL)
        # Before `obey_parent` has run there is no group of its own.
        super().kill()


class WorkerContext(SpawnContext):
    """The multiprocessing context whose processes are workers."""

    Process = WorkerProcess


def obey_parent() -> None:
    """To be called first in a worker: leave the actor's process group, ignore its signals, die when it dies.

    Starts one daemon thread, which waits for the actor's death and for nothing else; so it has no deadline.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN: programs that the reward starts would inherit it and be hard to stop.
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        # The kernel's own promise; it holds even while a reward keeps the interpreter lock (a long regular expression).
        # It speaks of the thread that started the worker: a pool lives in a thread that lives as long as the pool.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()


def _follow_parent() -> None:
    """Covers other systems, and a parent that died before the kernel was asked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
