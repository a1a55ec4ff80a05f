"""The child process that runs asynchronous rewards on one event loop. Started and killed by `event_loop_executor`.

Protocol, over one Connection: the child sends `None` once its rewards are loaded, receives `Call`s and sends
`(call id, Answers)` for each, in any order. It applies the time-out of each call; the parent bounds how many run at once.

A reward that computes without awaiting blocks every other call on its loop, and no code on that loop can report it. So the
child writes into shared memory which call runs and since when (`LoopWatchdog`); the parent reads it, and kills the child.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from async_rlhf.actors.rewards import Answer, RewardSpec
from async_rlhf.actors.scoring.executor import Answers, Call, ready, timed_out
from async_rlhf.actors.scoring.processes import OUT_OF_MEMORY, obey_parent

# Makes the child write its stack to stderr, also while a reward holds the interpreter lock.
SHOW_STACK = signal.SIGUSR1


def serve(connection: Connection, specs: tuple[RewardSpec, ...], memory_mb: int | None, watchdog: LoopWatchdog) -> None:
    """Runs until the parent kills the process or is gone."""
    obey_parent(memory_mb)
    faulthandler.register(SHOW_STACK, all_threads=False)
    for spec in specs:
        ready(spec)
    asyncio.run(_serve(connection, watchdog))


async def _serve(connection: Connection, watchdog: LoopWatchdog) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def start(call: Call) -> None:
        task = loop.create_task(_answer(connection, call, watchdog))
        running.add(task)
        task.add_done_callback(running.discard)

    # A thread reads, so that the parent can go on sending while a reward blocks the loop.
    reader = threading.Thread(target=_read, args=(connection, lambda call: loop.call_soon_threadsafe(start, call)), daemon=True)
    connection.send(None)
    reader.start()
    await asyncio.Event().wait()


def _read(connection: Connection, start: Callable[[Call], object]) -> None:
    """Until the parent closes its end of the connection, which ends the process."""
    while True:
        try:
            start(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


async def _answer(connection: Connection, call: Call, watchdog: LoopWatchdog) -> None:
    answers = await _call(call, watchdog)
    # The parent always reads, so this does not block the loop.
    connection.send((call.id, answers))


async def _call(call: Call, watchdog: LoopWatchdog) -> Answers:
    reward = ready(call.spec)
    if isinstance(reward, Answer):
        return (reward,)
    began = time.time()
    scope = asyncio.timeout(call.timeout_s)
    try:
        async with scope:
            result = await Watched(reward.function(**reward.arguments(call)), watchdog, call.id)
        return reward.read(call, result, began)
    except MemoryError:
        watchdog.begin(call.id)  # the parent reads which call it was
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        return (timed_out(call.timeout_s),) if scope.expired() else reward.failed(error, began)


_IDLE, _BYTES = -1.0, 16


class Turn(NamedTuple):
    """A call that runs, and since when in monotonic seconds."""

    call_id: int
    since: float


class LoopWatchdog:
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
        self._board[0] = _IDLE

    def look(self) -> Turn | None:
        """The running call. A torn read is harmless: a turn counts only once it has lasted."""
        call_id = self._board[0]
        return None if call_id == _IDLE else Turn(int(call_id), self._board[1])


class Watched:
    """Awaits a coroutine and records when it runs; tasks that it starts itself are not seen."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], watchdog: LoopWatchdog, call_id: int) -> None:
        self._coroutine, self._watchdog, self._call_id = coroutine, watchdog, call_id

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            self._watchdog.begin(self._call_id)
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
