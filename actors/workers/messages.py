"""The protocol of what is served to actors: sessions of users' code, each a call of a reward or an episode of an environment.

    client -> server   Describe, SessionStep, Show, Leave, SessionBeat
    server -> client   Description, Stepped, Shown, MissingSteps, SessionGone, SessionRefused

A client's message is two frames: the number of its session, empty for other messages, then the packed message. So a step that
cannot be read is refused by its number. The first step begins a session; each step has one answer, and one without `content`
ends the session. Messages may be lost while ZeroMQ connects again: a client's beat names what it waits for, and the server
sends once more what it has answered, and names what it does not know. A step is taken once, however often it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from async_rlhf.actors.rewards.answer import Answer
from async_rlhf.buffers.failures import Failure, FailureKind
from async_rlhf.buffers.protocol import message
from async_rlhf.buffers.protocol.message import Amount, Codec, Count, MessageBase

NUM_IDS = 1 << 40

Id = Annotated[int, Field(ge=0, lt=NUM_IDS)]
"""Of a session or a stream, the client's own."""


class Describe(message.Message): ...


class ReplyFields(MessageBase):
    """A `Reply` but for its text."""

    finish_reason: Literal["stop", "length"]
    num_prompt: Count
    num_tokens: Count


class SessionStep(message.Message):
    """The first of a session has members: the completions of a call, or the fields of an episode; each other what the model
    wrote in its turn, with the reply where it was called. stage: which reward, "" for the only one. tokens: expected cost.
    stream: of one that was shown."""

    id: Id
    turn: Count = 0
    stage: str = ""
    members: list[dict[str, Any]] = Field(default_factory=list)
    text: str | None = None
    reply: ReplyFields | None = None
    tokens: Count = 0
    stream: Id | None = None


class Show(message.Message):
    """An unfinished completion that a stage may read ahead of its end."""

    stage: str
    stream: Id
    member: dict[str, Any]


class Leave(message.Message):
    """Nothing more is wanted of these sessions and streams."""

    ids: list[Id] = Field(default_factory=list)
    streams: list[Id] = Field(default_factory=list)


class SessionBeat(message.Message):
    """open: all sessions that are wanted, each with the turn whose answer is waited for, -1 for none."""

    open: list[Annotated[tuple[Id, int], Field(strict=False)]]


class EnvironmentFields(MessageBase):
    """The part of an environment that a run needs, as in `EnvironmentSpec`."""

    name: str
    max_turns: int
    timeout_s: float
    episode_timeout_s: float | None
    at_limit: float | None
    calls: bool
    required: Annotated[list[str], Field(strict=False)]
    fields: Annotated[list[str], Field(strict=False)] | None
    tools: Annotated[list[dict[str, Any]], Field(strict=False)]
    judges: bool


class Description(message.Message):
    """answered, waiting: steps in the server's life. environment: what is played, None for rewards."""

    answered: int
    waiting: int
    environment: EnvironmentFields | None = None


class FailureFields(MessageBase):
    """A `Failure`."""

    kind: Annotated[FailureKind, Field(strict=False)]
    reason: str
    traceback: str
    retry_after_s: float | None


class AnswerFields(MessageBase):
    """An `Answer`; logprobs: little-endian float32."""

    value: float | None
    failure: FailureFields | None
    metrics: dict[str, float]
    began: float
    ended: float
    logprobs: bytes | None


class CallFields(MessageBase):
    """A `Call` but for its messages."""

    conversation: Count
    tools: Annotated[list[dict[str, Any]], Field(strict=False)]
    max_tokens: Annotated[int, Field(ge=1)] | None
    stop: Annotated[list[str], Field(strict=False)]
    trained: bool


class Stepped(message.Message):
    """The model's next input, with a score for its turn or the call that it belongs to; or, without content, the end of the
    session and its answers: of a reward one for each member or one for all, of an episode that of its score if it has one, with
    scores of its turns as of `Scores`."""

    id: Id
    turn: Count
    content: str | list[dict[str, Any]] | None = None
    score: float | None = None
    call: CallFields | None = None
    answers: list[AnswerFields] = Field(default_factory=list)
    turn_scores: list[Amount | None] = Field(default_factory=list)


class Shown(message.Message):
    """A stage has read these streams, or failed to."""

    stage: str
    streams: list[Id]
    answer: AnswerFields


class MissingSteps(message.Message):
    """Answers a beat. ids: of its sessions, those of which the step that is waited for has not come."""

    ids: list[Id]


class SessionGone(message.Message):
    """The server does not know the session whose turn this is, or the process that ran it died."""

    id: Id


class SessionRefused(message.Message):
    id: Id
    reason: str


Message = (
    Describe
    | SessionStep
    | Show
    | Leave
    | SessionBeat
    | Description
    | Stepped
    | Shown
    | MissingSteps
    | SessionGone
    | SessionRefused
)
STAGES: Codec[Message] = Codec(Message, "a reward", 64 << 20)
"""Between an actor and the scorer of its machine, both of one run."""
SERVED: Codec[Message] = Codec(Message, "a session", 4 << 20, converts=True, has_plain_keys=True)
"""Between any client and a server of a reward or an environment."""


def frames_of(message: Message, codec: Codec[Message]) -> list[bytes]:
    """A client's message as it is sent. Raises WireError."""
    return [b"%d" % message.id if isinstance(message, SessionStep) else b"", codec.pack(message)]


def to_fields(answer: Answer) -> AnswerFields:
    logprobs = None if answer.logprobs is None else answer.logprobs.astype("<f4").tobytes()
    failure = None if answer.failure is None else FailureFields(**answer.failure._asdict())
    return AnswerFields(**{**answer._asdict(), "failure": failure, "metrics": dict(answer.metrics), "logprobs": logprobs})


def to_answers(found: Iterable[AnswerFields]) -> tuple[Answer, ...]:
    return tuple(
        Answer(
            each.value,
            None if each.failure is None else Failure(**dict(each.failure)),
            each.metrics,
            each.began,
            each.ended,
            None if each.logprobs is None else np.frombuffer(each.logprobs, "<f4").astype(np.float32, copy=False),
        )
        for each in found
    )
