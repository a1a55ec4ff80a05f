"""The reward `remote`: the score of a reward server, from the event loop of asynchronous rewards.

One socket for each server a process uses. ZeroMQ reconnects by itself; a request lost meanwhile times out and is retried as
`retries` allows. Scoring changes nothing on the server, so a repeated request does no harm.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from async_rlhf.actors.rewards import CALLER, CALLER_ADDRESS, Answer, TransientError, reward
from async_rlhf.actors.scoring.messages import REWARDS, ScoreRequest, ScoreResponse, frames_of, to_answers
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.transport.keys import load_peer

_SEND_HWM = 10_000


@reward(retries=3, timeout_s=30.0)
async def remote(address: str, keys: str = "", timeout_s: float = 30.0, reward_name: str = "", **fields: Any) -> Score:
    """The score of the reward that the server at `address` serves.

    keys: a key directory (`async-rlhf keys new`), needed for a server on another machine. timeout_s: the server drops the
    request after it. reward_name: which of its rewards, where there are several.
    """
    if address == CALLER and not (address := os.environ.get(CALLER_ADDRESS, "")):
        raise RewardError("its function is in the process that started this run; start the run with train(rewards=[...]) again")
    answer = await _server(address, keys).score(reward_name, fields, timeout_s)
    if answer.retry_after_s is not None:
        raise TransientError(f"{address}: {answer.failure}", after_s=answer.retry_after_s)
    return answer.score()


def connect(socket: zmq.Socket[Any], address: str, keys: str, max_bytes: int) -> None:
    """To a server, as a key directory allows ("": without). Raises ConfigError for keys that cannot be read, zmq.ZMQError."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if keys:
        own = load_peer(Path(keys))
        socket.setsockopt(zmq.CURVE_SERVERKEY, own.hub_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own.secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(address)


@functools.cache
def _server(address: str, keys: str) -> _Server:
    return _Server(address, keys)


class _Server:
    """Owns a DEALER socket and the task that reads from it; both live as long as the process."""

    def __init__(self, address: str, keys: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        connect(self._socket, address, keys, REWARDS.max_bytes)
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def score(self, stage: str, fields: dict[str, Any], timeout_s: float) -> Answer:
        """Waits for the answer; the caller's time-out ends it."""
        loop = asyncio.get_running_loop()
        if self._reader is None or self._reader.done():
            self._reader = loop.create_task(self._read())
        request = ScoreRequest(id=next(self._ids), stage=stage, members=[fields], timeout_s=timeout_s)
        answer = self._pending[request.id] = loop.create_future()
        try:
            await self._socket.send_multipart(frames_of(request, REWARDS))
            found: Answer = await answer
            return found
        finally:
            del self._pending[request.id]

    async def _read(self) -> None:
        while True:
            message = REWARDS.unpack(await self._socket.recv())
            if isinstance(message, ScoreResponse):
                pending = self._pending.get(message.id)
                if pending is not None and not pending.done():
                    pending.set_result(to_answers(message.answers)[0])
