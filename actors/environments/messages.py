"""What an actor and a process that runs episodes tell each other over their connection.

    actor -> process   BeginEpisode, Reply, CloseEpisode
    process -> actor   None once the environment is imported, or StartFailed; EpisodeStep, EpisodeClosed

Each BeginEpisode and each Reply is answered by one EpisodeStep; each episode ends with EpisodeClosed, after its generator's
cleanup. An id names an episode of one actor's life.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from async_rlhf.actors.environments.yields import End, Read


class BeginEpisode(NamedTuple):
    """fields: what the environment can use of its columns, `prompt` and `seed`."""

    id: int
    fields: Mapping[str, Any]


class Reply(NamedTuple):
    """What the model wrote in its turn."""

    id: int
    text: str


class CloseEpisode(NamedTuple):
    """Nothing more is wanted of it."""

    id: int


class StartFailed(NamedTuple):
    """The environment cannot be imported; the process ends."""

    reason: str


class EpisodeStep(NamedTuple):
    """What a step came to. began, ended: of it, in seconds since the epoch. retire: as of EpisodeClosed."""

    id: int
    came: Read | End
    began: float
    ended: float
    retire: bool = False


class EpisodeClosed(NamedTuple):
    """failure: what its cleanup raised. retire: something of it runs on and cannot be stopped, or memory ran out: its process
    should take no further episodes."""

    id: int
    failure: str
    retire: bool


Message = BeginEpisode | Reply | CloseEpisode | StartFailed | EpisodeStep | EpisodeClosed | None
