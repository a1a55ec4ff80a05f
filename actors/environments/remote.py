"""An environment that a server plays (`server`, `async-rlhf serve environment`), as one of ours: `remote:tcp://HOST:PORT`.

    client -> server   Describe, Step, Leave, Beat
    server -> client   Description, Stepped, Gone

The server's description of its environment (its columns, limits and tools) is requested before the run. Then each episode here
is a generator that passes on what the model wrote. ZeroMQ reconnects by itself, and messages are lost meanwhile: a step that
is not answered is sent again, and the server plays each turn once. A server that began anew does not know the episode: it is
lost, and begun again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Literal

import zmq
import zmq.asyncio
from pydantic import Field

from async_rlhf.actors.environments.adapters import Adapted
from async_rlhf.actors.environments.settings import Declaration, Feedback
from async_rlhf.actors.scoring.remote import connect
from async_rlhf.buffers.errors import ConfigError, EpisodeError, EpisodeLostError, WireError
from async_rlhf.buffers.protocol.codec import Codec
from async_rlhf.buffers.protocol.message import Count, MessageBase
from async_rlhf.buffers.score import Score

BEAT_S = 10.0
_RESEND_S = 5.0
_DESCRIBE_S = 10.0


class Describe(MessageBase):
    type: Literal["describe"] = "describe"


class Description(MessageBase):
    """What a run must know of the environment; as in `EnvironmentSpec`."""

    type: Literal["description"] = "description"
    name: str
    max_turns: int
    timeout_s: float
    episode_timeout_s: float | None
    at_limit: float | None
    required: list[str]
    fields: list[str] | None
    tools: list[dict[str, Any]]
    judges: bool


class Step(MessageBase):
    """The first one has the fields of the episode, each other what the model wrote in its turn. id: the client's own."""

    type: Literal["step"] = "step"
    id: Count
    turn: Count
    fields: dict[str, Any] | None
    text: str | None


class Leave(MessageBase):
    """Nothing more is wanted of this episode."""

    type: Literal["leave"] = "leave"
    id: Count


class Beat(MessageBase):
    """open: all episodes that are wanted, of those that were begun before."""

    type: Literal["beat"] = "beat"
    open: list[Count]


class Stepped(MessageBase):
    """What the model reads next, and a score for its turn; or, without content, the end and its score."""

    type: Literal["stepped"] = "stepped"
    id: Count
    turn: Count
    content: str | list[dict[str, Any]] | None = None
    score: float | None = None
    scored: bool = False
    value: float | None = None
    failure: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class Gone(MessageBase):
    """The server does not know the episode, or its process died."""

    type: Literal["gone"] = "gone"
    id: Count
    turn: Count


Message = Describe | Description | Step | Leave | Beat | Stepped | Gone
PLAYED: Codec[Message] = Codec(Message, "episodes", 4 << 20, has_plain_keys=True)
"""Between any client and an environment server."""


def from_server(address: str, options: Mapping[str, Any]) -> Adapted:
    """The environment at this address. options: `keys`, a key directory, needed for a server on another machine.

    Raises EpisodeError when it does not answer, ConfigError for other options.
    """
    if unknown := options.keys() - {"keys"}:
        raise ConfigError(f"environment.options.{min(unknown)}: a remote environment takes keys; others are its server's")
    keys = str(options.get("keys", ""))
    description = _described(address, keys)

    async def remote(**fields: Any) -> AsyncIterator[Feedback | Score]:
        episode = _client(address, keys).begin()
        try:
            wanted = {name: value for name, value in fields.items() if description.fields is None or name in description.fields}
            came = await episode.step(wanted, None)
            if came.content is None:
                raise EpisodeError(came.failure or "it ended before the model wrote anything")
            while came.content is not None:
                text = yield Feedback(came.content, came.score)
                came = await episode.step(None, text)
            if came.scored:
                yield Score(came.value, came.failure, came.metrics)
        finally:
            await episode.leave()

    settings = Declaration(
        name=description.name,
        max_turns=description.max_turns,
        timeout_s=description.timeout_s + 2 * _RESEND_S,  # the server ends a step in its own time
        episode_timeout_s=description.episode_timeout_s,
        at_limit=description.at_limit,
    )
    return Adapted(remote, settings, tuple(description.required), tuple(description.tools), description.judges)


def _described(address: str, keys: str) -> Description:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        try:
            connect(socket, address, keys, PLAYED.max_bytes)
        except zmq.ZMQError as error:
            raise ConfigError(f"environment remote:{address} has no address ({error}); use remote:tcp://HOST:PORT") from error
        socket.send(PLAYED.pack(Describe()))
        if not socket.poll(int(_DESCRIBE_S * 1000)):
            keyed = "" if keys else ", without keys (environment.options.keys)"
            raise EpisodeError(
                f"no environment answers at {address} within {_DESCRIBE_S:g} s{keyed}; is it served (async-rlhf "
                "serve environment FILE:NAME --address ...)?"
            )
        try:
            description = PLAYED.unpack(socket.recv())
        except WireError as error:
            raise EpisodeError(f"{address} answers with {error}") from error
    if not isinstance(description, Description):
        raise EpisodeError(f"{address} serves no environment")
    return description


@functools.cache
def _client(address: str, keys: str) -> _Client:
    return _Client(address, keys)


class _Client:
    """Owns a DEALER socket, and the tasks that read from it and show the server that this process lives."""

    def __init__(self, address: str, keys: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        # The name by which the server knows its episodes, also over the next connection.
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        connect(self._socket, address, keys, PLAYED.max_bytes)
        self._ids = itertools.count()
        self._requested: dict[int, tuple[int, asyncio.Future[Stepped | Gone]]] = {}
        self._open: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> _Episode:
        """In the event loop."""
        if not self._tasks or any(task.done() for task in self._tasks):
            self._tasks = [asyncio.get_running_loop().create_task(work()) for work in (self._read, self._beat)]
        id = next(self._ids)
        self._open.add(id)
        return _Episode(self, id)

    async def request(self, step: Step) -> Stepped | Gone:
        """Waits for the answer; the caller's time-out ends it."""
        answer = asyncio.get_running_loop().create_future()
        self._requested[step.id] = step.turn, answer
        try:
            while not answer.done():
                await self._socket.send(PLAYED.pack(step))
                await asyncio.wait({answer}, timeout=_RESEND_S)
            found: Stepped | Gone = answer.result()
            return found
        finally:
            del self._requested[step.id]

    async def leave(self, id: int) -> None:
        self._open.discard(id)
        with suppress(zmq.ZMQError):  # The next beat leaves it out.
            await self._socket.send(PLAYED.pack(Leave(id=id)), zmq.DONTWAIT)

    async def _read(self) -> None:
        while True:
            with suppress(WireError):
                message = PLAYED.unpack(await self._socket.recv())
                if isinstance(message, Stepped | Gone):
                    turn, answer = self._requested.get(message.id, (-1, None))
                    if answer is not None and turn == message.turn and not answer.done():
                        answer.set_result(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with suppress(zmq.ZMQError):
                await self._socket.send(PLAYED.pack(Beat(open=sorted(self._open))), zmq.DONTWAIT)


class _Episode:
    def __init__(self, client: _Client, id: int) -> None:
        self._client, self._id, self._turn = client, id, 0

    async def step(self, fields: dict[str, Any] | None, text: str | None) -> Stepped:
        """The next turn. Raises EpisodeLostError where the server does not know the episode, or has lost it itself."""
        came = await self._client.request(Step(id=self._id, turn=self._turn, fields=fields, text=text))
        if isinstance(came, Gone):
            raise EpisodeLostError("its server began anew, or lost the process that played it")
        self._turn += 1
        return came

    async def leave(self) -> None:
        await self._client.leave(self._id)
