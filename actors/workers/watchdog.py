"""Which user code an event loop runs right now, readable from another process.

Code that computes without awaiting blocks every other session on its loop, and no code on that loop can report it. So the
process writes into shared memory whose turn it is and since when; the parent reads it, and kills the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Awaitable, Generator
from contextvars import ContextVar
from multiprocessing import util
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

GRACE_S = 2.0
"""What is cancelled has so long to end, and a worker so long to take a message; then it is taken for stuck."""
_IDLE, _BYTES = -1.0, 24


class RunningTurn(NamedTuple):
    """A call or an episode whose code runs, by its id, and since when in monotonic seconds."""

    id: int
    since: float


class LoopWatchdog:
    """Three numbers in shared memory: one process writes, one reads. Goes to a child as an argument of its process.

    The memory is a file without a name: multiprocessing's own would leave a directory behind when everything is killed.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_BYTES)
            self._share(os.dup(file.fileno()))
        self.end()

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._share(descriptor.detach())

    def _share(self, descriptor: int) -> None:
        self._descriptor = descriptor
        util.Finalize(self, os.close, (descriptor,))
        self._board = memoryview(mmap.mmap(descriptor, _BYTES)).cast("d")

    def begin(self, id: int) -> None:
        self._board[1] = time.monotonic()
        self._board[0] = id

    def end(self) -> None:
        self._board[0] = _IDLE

    def beat(self) -> None:
        """The loop turns."""
        self._board[2] = time.monotonic()

    @property
    def beaten(self) -> float:
        """When it last did, in monotonic seconds; 0 before the first time."""
        return self._board[2]

    def look(self) -> RunningTurn | None:
        """Whose turn it is. A torn read is harmless: a turn counts only once it has lasted."""
        id = self._board[0]
        return None if id == _IDLE else RunningTurn(int(id), self._board[1])


class Watched:
    """Awaits what is awaited of a user's and records when it runs; of the tasks that it starts itself those are seen that await
    what is `watched`."""

    def __init__(self, awaited: Awaitable[Any], watchdog: LoopWatchdog, id: int) -> None:
        self._awaited, self._watchdog, self._id = awaited, watchdog, id

    def __await__(self) -> Generator[Any, Any, Any]:
        _WATCHED.set((self._watchdog, self._id))
        steps = self._awaited.__await__()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            self._watchdog.begin(self._id)
            try:
                waits_for = steps.send(sent) if thrown is None else steps.throw(thrown)
            except StopIteration as done:
                return done.value
            finally:
                self._watchdog.end()
            sent = thrown = None
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001  handed on to the coroutine, cancellation included
                thrown = error


_WATCHED: ContextVar[tuple[LoopWatchdog, int] | None] = ContextVar("watched", default=None)


def watched(awaited: Awaitable[Any]) -> Awaitable[Any]:
    """In a task that what is watched has started: the same is recorded of it."""
    found = _WATCHED.get()
    return awaited if found is None else Watched(awaited, *found)
