"""Whose turn it is on an event loop, readable from another process.

A reward that computes without awaiting holds up every other call on its loop, and nothing on that loop can say so. The
child writes into shared memory which call runs now and since when; the parent looks, names it, and ends it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Coroutine, Generator
from multiprocessing import util
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

_NOBODY, _BYTES = -1.0, 16


class Turn(NamedTuple):
    """A call that runs, and since when in monotonic seconds."""

    call_id: int
    since: float


class TurnBoard:
    """Two numbers in shared memory: one process writes, one reads. Goes to a child as an argument of its process.

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

    def begin(self, call_id: int) -> None:
        self._board[1] = time.monotonic()
        self._board[0] = call_id

    def end(self) -> None:
        self._board[0] = _NOBODY

    def look(self) -> Turn | None:
        """Who runs now. Torn reads are possible and harmless: a turn counts only once it has lasted."""
        call_id = self._board[0]
        return None if call_id == _NOBODY else Turn(int(call_id), self._board[1])


class Watched:
    """Awaits a coroutine and says on the board when it runs; tasks that it starts itself are not seen."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], board: TurnBoard, call_id: int) -> None:
        self._coroutine, self._board, self._call_id = coroutine, board, call_id

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            self._board.begin(self._call_id)
            try:
                waits_for = steps.send(sent) if thrown is None else steps.throw(thrown)
            except StopIteration as done:
                return done.value
            finally:
                self._board.end()
            sent = thrown = None
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001  handed on to the coroutine, cancellation included
                thrown = error
