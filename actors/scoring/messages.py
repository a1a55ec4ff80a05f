"""The protocol of the scoring server: one MessagePack frame each way, validated against these types.

    client -> server   ScoreRequest, PrefetchRequest, ForgetStreams, DiscardRequests, Heartbeat
    server -> client   ScoreResponse, PrefetchResponse, ServerState

A client's message is two frames: the number of its request, empty for other messages, then the packed message. So a request
that cannot be read is answered too. Text may hold halves of surrogate pairs, as JSON lines of a data set may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from async_rlhf.actors.rewards import Answer
from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import MessageBase

PROTOCOL = 1
NUM_IDS = 1 << 40
_SURROGATES = "surrogatepass"

Id = Annotated[int, Field(ge=0, lt=NUM_IDS)]


class Channel(NamedTuple):
    """What may pass. converts: columns unknown to MessagePack travel as their text, else they are refused by the sender.

    has_plain_keys: dictionaries have texts as keys only: colliding numbers would cost a server time.
    """

    max_bytes: int
    converts: bool
    has_plain_keys: bool


STAGE_CHANNEL = Channel(64 << 20, converts=False, has_plain_keys=False)
"""Between an actor and the scorer of its machine, both of one run."""
REWARD_CHANNEL = Channel(4 << 20, converts=True, has_plain_keys=True)
"""Between any client and a reward server."""


class ScoreRequest(MessageBase):
    """One task of a stage, as `reward_queue.Task`; stage "" is a server's only one. timeout_s: the client waits no longer."""

    type: Literal["score"] = "score"
    id: Id
    stage: str = ""
    members: list[dict[str, Any]] = Field(min_length=1)
    tokens: int = Field(default=0, ge=0)
    stream: Id | None = None
    timeout_s: float | None = Field(default=None, gt=0)


class PrefetchRequest(MessageBase):
    """An unfinished completion that a stage may read ahead of its end."""

    type: Literal["prefetch"] = "prefetch"
    stage: str
    stream: Id
    member: dict[str, Any]


class ForgetStreams(MessageBase):
    type: Literal["forget"] = "forget"
    streams: list[Id]


class DiscardRequests(MessageBase):
    type: Literal["discard"] = "discard"
    ids: list[Id]


class Heartbeat(MessageBase):
    """Answered with ServerState."""

    type: Literal["heartbeat"] = "heartbeat"


class AnswerFields(MessageBase):
    """An `Answer`; logprobs: little-endian float32."""

    value: float | None
    failure: str | None
    traceback: str
    metrics: dict[str, float]
    began: float
    ended: float
    retry_after_s: float | None
    logprobs: bytes | None


class ScoreResponse(MessageBase):
    """One answer for each member of the request, or one for all."""

    type: Literal["scored"] = "scored"
    id: Id
    answers: list[AnswerFields] = Field(min_length=1)


class PrefetchResponse(MessageBase):
    """A stage has read these streams, or failed to."""

    type: Literal["prefetched"] = "prefetched"
    stage: str
    streams: list[Id]
    answer: AnswerFields


class ServerState(MessageBase):
    """life: changes when the server no longer knows the client's earlier requests. answered, waiting: requests in its life."""

    type: Literal["state"] = "state"
    life: str
    answered: int
    waiting: int


Message = (
    ScoreRequest
    | PrefetchRequest
    | ForgetStreams
    | DiscardRequests
    | Heartbeat
    | ScoreResponse
    | PrefetchResponse
    | ServerState
)
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def frames_of(message: Message, channel: Channel = STAGE_CHANNEL) -> list[bytes]:
    """A client's message as it is sent. Raises WireError."""
    return [b"%d" % message.id if isinstance(message, ScoreRequest) else b"", pack(message, channel)]


def pack(message: Message, channel: Channel = STAGE_CHANNEL) -> bytes:
    """Raises WireError for a message that is too large, and for a column that cannot travel."""
    # `model_dump` would convert columns that MessagePack does not know.
    fields = dict(message) if isinstance(message, ScoreRequest | PrefetchRequest) else message.model_dump()
    try:
        default = str if channel.converts else None
        packed: bytes = msgpack.packb([PROTOCOL, fields], default=default, unicode_errors=_SURROGATES)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"the columns of a reward cannot travel to the scorer process ({error})") from error
    if len(packed) > channel.max_bytes:
        raise WireError(f"a reward's request has {len(packed)} bytes; at most {channel.max_bytes} are sent")
    return packed


def unpack(data: bytes, channel: Channel = STAGE_CHANNEL) -> Message:
    """Raises WireError for anything that is not one of these."""
    try:
        protocol, fields = msgpack.unpackb(
            data, max_ext_len=0, strict_map_key=channel.has_plain_keys, unicode_errors=_SURROGATES
        )
        if protocol != PROTOCOL:
            raise ValueError(f"protocol {str(protocol)[:40]}")
        return _MESSAGES.validate_python(fields)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, ValidationError) as error:
        raise WireError(f"what is no message of protocol {PROTOCOL}: {str(error)[:200]}") from error


def to_fields(answer: Answer) -> AnswerFields:
    logprobs = None if answer.logprobs is None else answer.logprobs.astype("<f4").tobytes()
    return AnswerFields(**{**answer._asdict(), "metrics": dict(answer.metrics), "logprobs": logprobs})


def to_answers(found: Sequence[AnswerFields]) -> tuple[Answer, ...]:
    return tuple(Answer(**{**each.model_dump(), "logprobs": _array(each.logprobs)}) for each in found)


def _array(data: bytes | None) -> Any:
    return None if data is None else np.frombuffer(data, "<f4").astype(np.float32, copy=False)
