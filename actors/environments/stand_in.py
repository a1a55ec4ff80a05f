"""The stand-in for an environment that only the process which started the run has: each of its episodes is a connection there.

    stand-in -> caller   BeginEpisode, then a Reply for each turn of the model
    caller -> stand-in   for each of these Observed or EpisodeEnded

It is an environment like any other, in the same processes and under the same limits, and waits for what the caller answers. On
close, and past a time-out, it closes its connection, and the caller closes the episode's generator.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncGenerator
from typing import Any

from async_rlhf.actors.environments.messages import EPISODES, BeginEpisode, EpisodeEnded, Message, Observed, Reply
from async_rlhf.actors.environments.settings import Feedback
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.score import Score

STAND_IN, CALLER_SOCKET = f"{__name__}:stand_in", "ASYNC_RLHF_CALLER_ENVIRONMENT"
"""What a run's configuration names, and the variable with the path of the caller's socket."""

_LENGTH = struct.Struct("!I")


async def stand_in(**fields: Any) -> AsyncGenerator[Feedback | Score, str]:
    """fields: of the episode. Raises EpisodeError where there is no caller, and for what ended it before its first turn."""
    path = os.environ.get(CALLER_SOCKET, "")
    if not path:
        raise EpisodeError(
            "its function is in the process that started this run; start the run with train(environment=...) again"
        )
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        sent: Message = BeginEpisode(id=0, fields=fields)
        while not isinstance(came := await _exchange(reader, writer, sent), EpisodeEnded):
            text = yield Feedback(came.content, came.score)
            sent = Reply(id=0, text=text)
        if came.failure is not None and isinstance(sent, BeginEpisode):
            raise EpisodeError(came.failure)
        if came.scored:
            yield Score(came.value, came.failure, came.metrics)
    finally:
        writer.close()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message) -> Observed | EpisodeEnded:
    await send(writer, message)
    came = await receive(reader)
    if not isinstance(came, Observed | EpisodeEnded):
        raise EpisodeError("the process that started this run has ended the episode")
    return came


async def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Raises OSError when the other side has gone, WireError for a column that cannot travel."""
    packed = EPISODES.pack(message)
    writer.write(_LENGTH.pack(len(packed)) + packed)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """None when the other side has gone. Raises WireError."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return EPISODES.unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None
