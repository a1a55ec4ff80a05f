"""The process that runs rewards: plain ones, a call at a time, or asynchronous ones on an event loop, many at once.

Protocol, over one connection: the process sends `None` once its rewards are loaded, receives `Call`s and sends
`(call id, Answers)` for each. A plain call has no time-out here: the parent kills the process. An asynchronous one is
cancelled at its own.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from async_rlhf.actors.rewards import Answer, RewardSpec
from async_rlhf.actors.scoring.executor import Answers, Call, Ready, ready, timed_out
from async_rlhf.actors.workers.process import OUT_OF_MEMORY, obey_parent
from async_rlhf.actors.workers.watchdog import LoopWatchdog, Watched

# Makes the process write its stack to stderr, also while a reward holds the interpreter lock.
SHOW_STACK = signal.SIGUSR1


def serve(connection: Connection, watchdog: LoopWatchdog, specs: tuple[RewardSpec, ...], memory_mb: int | None) -> None:
    """Runs until the parent kills the process or is gone. specs: all plain, or all asynchronous."""
    obey_parent(memory_mb)
    # Before the first call, so that imports do not count against its time-out.
    rewards = {spec.name: ready(spec) for spec in specs}
    if specs[0].kind == "async":
        faulthandler.register(SHOW_STACK, all_threads=False)
        asyncio.run(_serve_on_loop(connection, watchdog, rewards))
    connection.send(None)
    _read(connection, lambda call: connection.send((call.id, run_call(rewards[call.name], call))))


def _read(connection: Connection, take: Callable[[Call], object]) -> None:
    """Until the parent closes its end of the connection, which ends the process."""
    while True:
        try:
            take(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def run_call(reward: Ready | Answer, call: Call) -> Answers:
    """Call a plain reward; whatever it does short of ending the process becomes an answer."""
    if isinstance(reward, Answer):
        return (reward,)
    began = time.time()
    try:
        if call.prefetch:
            reward.prefetch(call)
            return (Answer(None, began=began, ended=time.time()),)
        return reward.read(call, reward.function(**reward.arguments(call)), began)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        return reward.failed(error, began)


async def _serve_on_loop(connection: Connection, watchdog: LoopWatchdog, rewards: Mapping[str, Ready | Answer]) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def start(call: Call) -> None:
        task = loop.create_task(_answer(connection, rewards[call.name], call, watchdog))
        running.add(task)
        task.add_done_callback(running.discard)

    def take(call: Call) -> None:
        loop.call_soon_threadsafe(start, call)

    # A thread reads, so that the parent can go on sending while a reward blocks the loop.
    reader = threading.Thread(target=_read, args=(connection, take), daemon=True)
    connection.send(None)
    reader.start()
    await asyncio.Event().wait()


async def _answer(connection: Connection, reward: Ready | Answer, call: Call, watchdog: LoopWatchdog) -> None:
    answers = await _await_call(reward, call, watchdog)
    # The parent always reads, so this does not block the loop.
    connection.send((call.id, answers))


async def _await_call(reward: Ready | Answer, call: Call, watchdog: LoopWatchdog) -> Answers:
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
