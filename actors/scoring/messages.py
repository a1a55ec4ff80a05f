"""The protocol of the scoring server.

    client -> server   ScoreRequest, PrefetchRequest, ForgetStreams, DiscardRequests, Heartbeat
    server -> client   ScoreResponse, PrefetchResponse, ServerState

A client's message is two frames: the number of its request, empty for other messages, then the packed message. So a request
that cannot be read is answered too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from async_rlhf.actors.rewards import Answer
from async_rlhf.buffers.protocol.codec import Codec
from async_rlhf.buffers.protocol.message import MessageBase

NUM_IDS = 1 << 40

Id = Annotated[int, Field(ge=0, lt=NUM_IDS)]


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
STAGES: Codec[Message] = Codec(Message, "a reward", 64 << 20)
"""Between an actor and the scorer of its machine, both of one run."""
REWARDS: Codec[Message] = Codec(Message, "a reward", 4 << 20, converts=True, has_plain_keys=True)
"""Between any client and a reward server."""


def frames_of(message: Message, codec: Codec[Message] = STAGES) -> list[bytes]:
    """A client's message as it is sent. Raises WireError."""
    return [b"%d" % message.id if isinstance(message, ScoreRequest) else b"", codec.pack(message)]


def to_fields(answer: Answer) -> AnswerFields:
    logprobs = None if answer.logprobs is None else answer.logprobs.astype("<f4").tobytes()
    return AnswerFields(**{**answer._asdict(), "metrics": dict(answer.metrics), "logprobs": logprobs})


def to_answers(found: Sequence[AnswerFields]) -> tuple[Answer, ...]:
    return tuple(Answer(**{**each.model_dump(), "logprobs": _array(each.logprobs)}) for each in found)


def _array(data: bytes | None) -> Any:
    return None if data is None else np.frombuffer(data, "<f4").astype(np.float32, copy=False)
