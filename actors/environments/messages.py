"""The protocol between an actor and a process that runs episodes.

    actor -> process   BeginEpisode, Reply, CloseEpisode
    process -> actor   WorkerReady, StartFailed, Observed, EpisodeEnded, EpisodeClosed

Each BeginEpisode and each Reply is answered by one Observed or EpisodeEnded; each episode ends with EpisodeClosed, after its
generator's cleanup. An id names an episode of one actor's life.
"""

from __future__ import annotations

from typing import Any, Literal

from async_rlhf.actors.environments.yields import Kind, Reason
from async_rlhf.buffers.protocol.codec import Codec
from async_rlhf.buffers.protocol.message import Count, MessageBase


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
EPISODES: Codec[Message] = Codec(Message, "an episode", 1 << 31)
"""Within one machine."""
