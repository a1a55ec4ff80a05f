"""The reward `remote`: asks a reward server, from the event loop that asynchronous rewards share.

One socket for each server a process asks. ZeroMQ connects again by itself; what was lost meanwhile runs into its time-out
and is asked again, as often as `retries` allows. Two actors may ask the same: a reward's answer changes nothing there.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from async_rlhf.actors.rewards.settings import TransientError, reward
from async_rlhf.actors.scoring.served_messages import MAX_BYTES, Ask, Told, pack, unpack
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.transport.keys import load_peer

_SEND_HWM = 10_000


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", timeout_s: float = 30.0, **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. timeout_s: after it the server
    need not answer any more.
    """
    told = await _server(address, keys).ask(fields, timeout_s)
    if told.retry_after_s is not None:
        raise TransientError(f"{address}: {told.failure}", after_s=told.retry_after_s)
    return Score(told.value, told.failure, told.metrics)


@functools.cache
def _server(address: str, keys: str) -> _Server:
    return _Server(address, keys)


class _Server:
    """Owns a DEALER socket and the task that reads from it; both live as long as the process."""

    def __init__(self, address: str, keys: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        if keys:
            own = load_peer(Path(keys))
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, own.hub_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own.secret))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        self._socket.connect(address)
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[Told]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def ask(self, fields: dict[str, Any], timeout_s: float) -> Told:
        """Waits for the answer; the caller's time-out ends it."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())
        number = next(self._ids)
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self._socket.send(pack(Ask(id=number, fields=fields, timeout_s=timeout_s)))
            return await answer
        finally:
            del self._asked[number]

    async def _read(self) -> None:
        while True:
            told = unpack(Told, await self._socket.recv())
            asked = self._asked.get(told.id)
            if asked is not None and not asked.done():  # else the one who asked has given up
                asked.set_result(told)
