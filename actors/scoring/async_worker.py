"""The child process that runs asynchronous rewards on one event loop. Started and killed by `async_calls`.

Protocol, over one Connection: the child sends `None` once its rewards are loaded, receives `Call`s and sends
`(call id, Answer)` for each, in any order. It limits the time of each call; how many run at once is the parent's rule.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from actors.rewards import Answer, RewardSpec, failed
from actors.scoring.calls import Call, ready, timed_out
from actors.scoring.processes import obey_parent


def serve(connection: Connection, specs: tuple[RewardSpec, ...], timeout_s: float) -> None:
    """Runs until the parent kills the process or is gone."""
    obey_parent()
    for spec in specs:
        ready(spec)
    asyncio.run(_serve(connection, timeout_s))


async def _serve(connection: Connection, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def start(call: Call) -> None:
        task = loop.create_task(_answer(connection, call, timeout_s))
        running.add(task)
        task.add_done_callback(running.discard)

    # A thread reads, so that the parent can go on sending while a reward blocks the loop.
    reader = threading.Thread(target=_read, args=(connection, lambda call: loop.call_soon_threadsafe(start, call)), daemon=True)
    connection.send(None)
    reader.start()
    await asyncio.Event().wait()


def _read(connection: Connection, start: Callable[[Call], object]) -> None:
    """Waits for calls as long as the process lives; the parent's end of the connection closes when the parent is done."""
    while True:
        try:
            start(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


async def _answer(connection: Connection, call: Call, timeout_s: float) -> None:
    began = time.perf_counter()
    answer = await _call(call, timeout_s)
    # The parent always reads, so this does not block the loop.
    connection.send((call.id, answer._replace(seconds=time.perf_counter() - began)))


async def _call(call: Call, timeout_s: float) -> Answer:
    reward = ready(call.spec)
    if isinstance(reward, Answer):
        return reward
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            result = await reward.function(**reward.signature.arguments(call.fields))
        return reward.signature.verdict(result)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
        return timed_out(timeout_s) if scope.expired() else failed(error)
