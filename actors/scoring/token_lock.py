"""A lock between processes that has no name: a byte in a pipe, held by the process that has taken it out.

multiprocessing's own locks are named semaphores, which stay in /dev/shm when everything is killed at once.
"""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection, Pipe
from types import TracebackType


class TokenLock:
    """A recursive lock, as `multiprocessing.RLock`: goes to a process as an argument of it, and is held by one thread.

    Waits for the byte. Woken by `release` in any process. A process that dies with the byte keeps it.
    """

    def __init__(self) -> None:
        reader, writer = Pipe(duplex=False)
        os.write(writer.fileno(), b"\0")
        self.__setstate__((reader, writer))

    def __getstate__(self) -> tuple[Connection, Connection]:
        return self._reader, self._writer

    def __setstate__(self, ends: tuple[Connection, Connection]) -> None:
        self._reader, self._writer = ends
        os.set_blocking(self._reader.fileno(), False)
        self._owner, self._held = 0, 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Whether it was had within `timeout` seconds; None: however long it takes."""
        if self._owner != threading.get_ident():
            until = None if timeout is None else time.monotonic() + timeout
            while not self._take():
                left_s = None if until is None else until - time.monotonic()
                if not block or (left_s is not None and left_s <= 0):
                    return False
                self._reader.poll(left_s)
            self._owner = threading.get_ident()
        self._held += 1
        return True

    def release(self) -> None:
        """Raises AssertionError in a thread that does not hold it."""
        assert self._owner == threading.get_ident(), "release() of a lock that another thread holds"
        self._held -= 1
        if not self._held:
            self._owner = 0
            os.write(self._writer.fileno(), b"\0")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.release()

    def _take(self) -> bool:
        try:
            return bool(os.read(self._reader.fileno(), 1))
        except BlockingIOError:
            return False
