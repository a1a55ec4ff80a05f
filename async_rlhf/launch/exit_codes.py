"""The exit codes, the same for the command line and for every process of a run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from async_rlhf.buffers.errors import (
    AsyncRLHFError,
    ConfigError,
    DamagedError,
    DivergedError,
    EpisodeError,
    MismatchError,
    NonFiniteError,
    RewardError,
    StalenessError,
)

DONE = 0
FAILED = 1
USAGE = 2
CONFIGURATION = 3
STALLED = 4
WORKER_LOST = 5
REWARDS_FAILED = 6
REFUSED_TO_TRAIN = 7
DAMAGED = 8
HOST_LOST = 9
"""The code of a role whose host cannot be reached: its end is unknown, and does not count as a death."""
INTERRUPTED = 130


class StalledError(AsyncRLHFError):
    """No step was finished for too long; the message is the stall report."""


class WorkerLostError(AsyncRLHFError):
    """A process of the run ends again and again."""


class RefusedToTrainError(AsyncRLHFError):
    """The learner's process ended rather than train on its data."""


class InterruptedRunError(AsyncRLHFError):
    """The run was forced to end before it had drained; `--resume` continues it."""


FATAL: dict[int, type[AsyncRLHFError]] = {
    CONFIGURATION: ConfigError,
    STALLED: StalledError,
    REWARDS_FAILED: RewardError,
    REFUSED_TO_TRAIN: RefusedToTrainError,
    DAMAGED: DamagedError,
}
"""The error of a run by the exit code of its process, for codes that a restart would repeat."""


_CODES: dict[type, int] = {kind: code for code, kind in FATAL.items()} | {
    WorkerLostError: WORKER_LOST,
    EpisodeError: REWARDS_FAILED,
    **dict.fromkeys((StalenessError, NonFiniteError, MismatchError, DivergedError), REFUSED_TO_TRAIN),
    InterruptedRunError: INTERRUPTED,
}


def exit_code(error: BaseException) -> int:
    """The code that stands for this error."""
    return next((_CODES[kind] for kind in type(error).mro() if kind in _CODES), FAILED)


def end_with(work: Callable[[], int]) -> NoReturn:
    """End this process with the code of its work; with a traceback and 1 after an error."""
    code = FAILED
    try:
        code = work()
    except BaseException:  # noqa: BLE001  this process goes no further up than here
        traceback.print_exc()
    finally:
        logging.shutdown()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)  # neither threads of libraries nor one that waits for a disk must keep a process that is done


def ending(code: int, words: str) -> str:
    """How a process ended, as one reads it: negative codes are signals. words: its last, which count where it ended itself, by
    a code or, as a library does that cannot go on (nccl, when a collective fails), by SIGABRT."""
    how = f"with code {code}"
    if code < 0:
        how = f"by signal {-code}"
        with suppress(ValueError):  # those without a name
            how += f" ({signal.Signals(-code).name})"
    return how + (f" ({words})" if words and (code > 0 or code == -signal.SIGABRT) else "")
