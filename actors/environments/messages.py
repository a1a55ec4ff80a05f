"""The protocol between an actor and a process that runs episodes: one MessagePack text each, validated against these types.

    actor -> process   BeginEpisode, Reply, CloseEpisode
    process -> actor   WorkerReady, StartFailed, Observed, EpisodeEnded, EpisodeClosed

Each BeginEpisode and each Reply is answered by one Observed or EpisodeEnded; each episode ends with EpisodeClosed, after its
generator's cleanup. An id names an episode of one actor's life. Text of columns may hold halves of surrogate pairs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from async_rlhf.actors.environments.yields import Kind, Reason
from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import Count, MessageBase

_SURROGATES = "surrogatepass"


class BeginEpisode(MessageBase):
    """fields: what the environment can use of its columns, `prompt` and `seed`."""

    type: Literal["begin"] = "begin"
    id: Count
    fields: dict[str, Any]


class Reply(MessageBase):
    """What the model wrote in its turn."""

    type: Literal["reply"] = "reply"
    id: Count
    text: str


class CloseEpisode(MessageBase):
    """Nothing more is wanted of it."""

    type: Literal["close"] = "close"
    id: Count


class WorkerReady(MessageBase):
    """The environment is imported."""

    type: Literal["ready"] = "ready"


class StartFailed(MessageBase):
    """The environment cannot be imported; the process ends."""

    type: Literal["start_failed"] = "start_failed"
    reason: str


class Observed(MessageBase):
    """What the model is to read. score: of the turn before. began, ended: of the step, in seconds since the epoch."""

    type: Literal["observed"] = "observed"
    id: Count
    content: str | list[dict[str, Any]]
    score: float | None
    began: float
    ended: float


class EpisodeEnded(MessageBase):
    """scored: there is a score, whose state is given by value and failure. retire: as of EpisodeClosed."""

    type: Literal["ended"] = "ended"
    id: Count
    reason: Reason
    kind: Kind
    scored: bool
    value: float | None
    failure: str | None
    metrics: dict[str, float]
    traceback: str
    began: float
    ended: float
    retire: bool = False


class EpisodeClosed(MessageBase):
    """failure: what its cleanup raised. retire: something of it runs on and cannot be stopped, or memory ran out: its process
    should take no further episodes."""

    type: Literal["closed"] = "closed"
    id: Count
    failure: str
    retire: bool


Message = BeginEpisode | Reply | CloseEpisode | WorkerReady | StartFailed | Observed | EpisodeEnded | EpisodeClosed
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def pack(message: Message) -> bytes:
    """Raises WireError for a column that cannot travel."""
    try:
        # Not `model_dump`, which would convert columns that MessagePack does not know.
        packed: bytes = msgpack.packb(dict(message), unicode_errors=_SURROGATES)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"the columns of an episode cannot travel to its process ({error})") from error
    return packed


def unpack(data: bytes) -> Message:
    """Raises WireError for anything that is not one of these."""
    try:
        fields = msgpack.unpackb(data, max_ext_len=0, strict_map_key=False, unicode_errors=_SURROGATES)
        return _MESSAGES.validate_python(fields)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, ValidationError) as error:
        raise WireError(f"what is no message about an episode: {str(error)[:200]}") from error
