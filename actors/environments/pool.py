"""Stub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from async_rlhf.buffers.record import Score

Key = TypeVar("Key")
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Observation(Generic[Key]):
    key: Key
    content: Content
    score: float | None
    began: float
    ended: float


@dataclass(frozen=True)
class Ended(Generic[Key]):
    key: Key
    score: Score | None
    reason: Literal["scored", "returned", "failed", "max_turns"]
    began: float
    ended: float


@dataclass(frozen=True)
class Lost(Generic[Key]):
    key: Key


class EpisodePool(Protocol[Key]):
    def begin(self, key: Key, fields: Mapping[str, Any]) -> None: ...
    def reply(self, key: Key, text: str) -> None: ...
    def poll(self) -> list[Observation[Key] | Ended[Key] | Lost[Key]]: ...
    def discard(self, keys: Sequence[Key]) -> None: ...
