"""The effect of an operator's terminal on a run: its signals ask the run to end, and its own end does nothing.

When a terminal is closed, or its reader ends, the kernel sends SIGHUP, which would end a program, and refuses what is written
(EIO; EPIPE where it was a pipe).
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE)
_SAME_S = 2.0


@contextmanager
def on_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler` until the block ends, SIGHUP nowhere; only the main thread may ask for them.

    SIGTERM soon after SIGTERM is the same one: Slurm sends it to every process of a job, and a job's script passes it on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated_at = -math.inf

    def take(number: int, frame: Any) -> None:
        nonlocal terminated_at
        before_it, now = terminated_at, time.monotonic()
        if number == signal.SIGTERM:
            terminated_at = now
        if number != signal.SIGTERM or now - before_it >= _SAME_S:
            handler(number, frame)

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with outliving_terminal():
            yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Within the block the terminal's end ends neither this process nor its children. Only for the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Lasting:
    """A stream of this process that fails at nothing: what its encoding has not is written as an escape, what a full disk does
    not take is left out. It leads nowhere once its other end is gone; so do then standard output and standard error, where they
    lead to the same end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._lasting():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                self._leave()
        except (ValueError, AttributeError):
            pass  # the stream is closed, or there is none

    def _leave(self) -> None:
        stream = os.fstat(self._stream.fileno())
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in {self._stream.fileno(), 1, 2}:
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), stream):
                    os.dup2(nowhere, descriptor)
        os.close(nowhere)
