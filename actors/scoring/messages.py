"""What an actor and the scorer of its machine say to each other: one MessagePack frame each way, checked against these types.

Before the actor's frame stands one with the number of the task it asks, so that what cannot be read is answered too.

    actor -> scorer   Ask, Show, Forget, Discard, Beat        scorer -> actor   Told, Read, Alive

What a column holds travels as MessagePack knows it (a tuple is a list there); a column of another kind is refused where it is
sent, never replaced by its text. Texts may hold halves of surrogate pairs, as JSON lines of a data set may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from async_rlhf.actors.rewards import Answer
from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.message import MessageBase

PROTOCOL = 1
MAX_BYTES = 64 << 20
_HALVES = "surrogatepass"


class Ask(MessageBase):
    """One task of a stage, as `async_rlhf.actors.scoring.reward_queue.Task`."""

    type: Literal["ask"] = "ask"
    id: int
    stage: str
    members: list[dict[str, Any]]
    tokens: int
    stream: int | None


class Show(MessageBase):
    """There is more of a completion; members: by stage, what it can use of it."""

    type: Literal["show"] = "show"
    stream: int
    members: dict[str, dict[str, Any]]


class Forget(MessageBase):
    type: Literal["forget"] = "forget"
    streams: list[int]


class Discard(MessageBase):
    type: Literal["discard"] = "discard"
    ids: list[int]


class Beat(MessageBase):
    """Somebody listens. Answered with Alive."""

    type: Literal["beat"] = "beat"


class Said(MessageBase):
    """An `Answer`; logprobs: little-endian float32."""

    value: float | None
    failure: str | None
    traceback: str
    metrics: dict[str, float]
    began: float
    ended: float
    retry_after_s: float | None
    logprobs: bytes | None


class Told(MessageBase):
    """A task is answered: for each of its members, or once for all."""

    type: Literal["told"] = "told"
    id: int
    answers: list[Said]


class Read(MessageBase):
    """A stage was shown these streams."""

    type: Literal["read"] = "read"
    stage: str
    streams: list[int]
    answer: Said


class Alive(MessageBase):
    """life: a name for this life of the scorer with this actor; what was asked in the one before is lost. answered: tasks in
    the scorer's life; waiting: those that are not."""

    type: Literal["alive"] = "alive"
    life: str
    answered: int
    waiting: int


Message = Ask | Show | Forget | Discard | Beat | Told | Read | Alive
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def pack(message: Message) -> bytes:
    """Raises WireError for what is too large, and for a column that MessagePack does not know."""
    # A dump would make texts of what MessagePack does not know.
    fields = dict(message) if isinstance(message, Ask | Show) else message.model_dump()
    try:
        packed: bytes = msgpack.packb([PROTOCOL, fields], unicode_errors=_HALVES)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"what a reward asks for cannot travel to the scorer process ({error})") from error
    if len(packed) > MAX_BYTES:
        raise WireError(f"what a reward asks for has {len(packed)} bytes; at most {MAX_BYTES} travel to the scorer process")
    return packed


def unpack(data: bytes) -> Message:
    """Raises WireError for anything that is not one of these."""
    try:
        # Rows of tasks have numbers as keys too; both ends are processes of one run.
        protocol, fields = msgpack.unpackb(data, max_ext_len=0, strict_map_key=False, unicode_errors=_HALVES)
        if protocol != PROTOCOL:
            raise ValueError(f"protocol {str(protocol)[:40]}")
        return _MESSAGES.validate_python(fields)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, ValidationError) as error:
        raise WireError(f"what is no message of protocol {PROTOCOL}: {str(error)[:200]}") from error


def said(answer: Answer) -> Said:
    """As it travels."""
    tokens = None if answer.logprobs is None else answer.logprobs.astype("<f4").tobytes()
    return Said(**{**answer._asdict(), "metrics": dict(answer.metrics), "logprobs": tokens})


def answers(told: Sequence[Said]) -> tuple[Answer, ...]:
    """As the pool takes them."""
    return tuple(Answer(**{**each.model_dump(), "logprobs": _array(each.logprobs)}) for each in told)


def _array(data: bytes | None) -> Any:
    return None if data is None else np.frombuffer(data, "<f4").astype(np.float32, copy=False)
