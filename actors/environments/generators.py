"""A generator that is driven one step at a time, synchronous or asynchronous, in the process that runs it.

A step returns what it came to and never raises for what the user's code does. An asynchronous step runs on the event loop and
is cancelled when it must end; a synchronous one runs in a thread, which ends only with its process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from async_rlhf.actors.environments.yields import End, Read, fails, raised, read_return
from async_rlhf.actors.workers.watchdog import LoopWatchdog, Watched

Reader = Callable[[Any], Read | End]
"""Reads a yielded value."""


class Steps(Protocol):
    """stoppable: a step that is cancelled ends."""

    stoppable: bool

    def step(self, sent: str | None, turn: int, reads: Reader) -> asyncio.Future[Read | End]:
        """Give the generator what the model wrote, None at first; the result is what it yielded. turn: the model's so far."""
        ...

    def close(self) -> asyncio.Future[str]:
        """Run the generator's cleanup; the result is what that raised, "" for nothing."""
        ...


class AsyncSteps:
    """Of an asynchronous generator. The watchdog shows whose step the loop runs."""

    stoppable = True

    def __init__(self, generator: AsyncGenerator[Any, Any], watchdog: LoopWatchdog, id: int) -> None:
        self._generator, self._watchdog, self._id = generator, watchdog, id

    def step(self, sent: str | None, turn: int, reads: Reader) -> asyncio.Future[Read | End]:
        return asyncio.ensure_future(self._step(sent, turn, reads))

    def close(self) -> asyncio.Future[str]:
        return asyncio.ensure_future(self._close())

    async def _step(self, sent: str | None, turn: int, reads: Reader) -> Read | End:
        try:
            return reads(await Watched(self._generator.asend(sent), self._watchdog, self._id))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return fails("raised", "CancelledError: something cancelled what the environment waits for")
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            return _end_of(error, turn)

    async def _close(self) -> str:
        try:
            await Watched(self._generator.aclose(), self._watchdog, self._id)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  the user's cleanup may raise anything
            return raised(error).failure
        return ""


class ThreadSteps:
    """Of a synchronous generator; each step in whichever thread is free."""

    stoppable = False

    def __init__(self, generator: Generator[Any, Any, Any], threads: Executor) -> None:
        self._generator, self._threads = generator, threads

    def step(self, sent: str | None, turn: int, reads: Reader) -> asyncio.Future[Read | End]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._step, sent, turn, reads)

    def close(self) -> asyncio.Future[str]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._close)

    def _step(self, sent: str | None, turn: int, reads: Reader) -> Read | End:
        try:
            return reads(self._generator.send(sent))
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            return _end_of(error, turn)

    def _close(self) -> str:
        try:
            self._generator.close()
        except BaseException as error:  # noqa: BLE001  the user's cleanup may raise anything
            return raised(error).failure
        return ""


def _end_of(error: BaseException, turn: int) -> End:
    """What a step that gave nothing came to."""
    if isinstance(error, StopIteration | StopAsyncIteration):
        return read_return(turn, getattr(error, "value", None))
    return fails("died", "out of memory") if isinstance(error, MemoryError) else raised(error)


class DaemonThreads(Executor):
    """One for each call, so that a step that hangs takes no other's place and never keeps the process alive."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function(*arguments, **named))

        threading.Thread(target=run, name="episode", daemon=True).start()
        return future
