"""Settings of the ground floor, and the base every configuration section shares. No torch, no sockets."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SerializationInfo, ValidationInfo, field_validator
from pydantic.types import SecretStr

from async_rlhf.buffers.errors import ConfigError

REVEALED = {"secrets": "revealed"}
"""Context of a dump that holds secrets, for a file that this user alone may read; without it they are asterisks."""


def _dumped(secret: SecretStr, info: SerializationInfo) -> str:
    return secret.get_secret_value() if info.context == REVEALED else str(secret)


Secret = Annotated[SecretStr, PlainSerializer(_dumped, when_used="json")]
"""A text that no display, tracker, message or report shows: the type of a setting that may hold a key."""


def _takes_truth(kind: Any) -> bool:
    """Whether a truth value may stand in it; a section looks for itself."""
    return kind in (bool, Any) or isinstance(kind, type(Section)) or any(map(_takes_truth, get_args(kind)))


def _holds_truth(value: Any, depth: int = 4) -> bool:
    """depth: of the tables and lists to look into; no setting has more."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or (depth > 0 and any(_holds_truth(each, depth - 1) for each in inner))


class Section(BaseModel):
    """A frozen group of settings: unknown keys are refused, every field has a meaning, a unit and a range."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: the word "none" stands for it where a setting may be left open. One text is a list of one. A truth
        value is no number."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if value == "none" and type(None) in get_args(kind):
            return None
        if _holds_truth(value) and not _takes_truth(kind):
            raise ValueError("it cannot be true or false")
        return (value,) if isinstance(value, str) and kind == tuple[str, ...] else value


class KindSection(Section):
    """A section whose `kind` decides which keys it has beside its fields."""

    kind: str

    @classmethod
    @abstractmethod
    def kinds(cls) -> Collection[str]:
        """Those that are shipped."""

    @classmethod
    @abstractmethod
    def of_kind(cls, kind: str) -> type[Section]:
        """A section with the keys of a kind, and perhaps those of this one. Raises ConfigError for a kind that has none."""


def check_installed(package: str, key: str, value: object, extra: str, other: str) -> None:
    """Raises ConfigError with the line that installs it. extra: ours that brings it; other: what `key` could be without."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key} = {value!r} needs the package {package}: pip install 'async-rlhf[{extra}]'. Without it: {other}"
        )


Fsync = Literal["group", "off"]


MAX_FRAME_BYTES = 64 << 20
"""Largest frame that the hub takes from a peer, in bytes: the tokens of a group (a chunk of weights has 1 MiB). Twice as large
ones cut the peer."""
REQUEST_TIMEOUT_S = 300.0
"""An actor or the learner waits so long for the hub to answer before it gives up and ends: longer than a hub of weeks reads its
journal."""


class QueueConfig(Section):
    """The replay queue: how old data may be, in which order it is consumed, how it survives."""

    max_staleness: int = Field(default=1, ge=0, le=1024)
    """Largest staleness, in learner steps, of any loss-bearing token at the moment it is trained on; 0 is synchronous."""
    exact: bool = False
    """Generate every group by exactly version max(0, step - max_staleness): deterministic, for ablations."""
    window: int = Field(default=1, ge=1, le=65536)
    """A batch takes the oldest ready groups among the next `window`; 1: strict order."""
    lease_s: float = Field(default=15.0, gt=0)
    """Seconds an actor may be silent before its groups go to others."""
    progress_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds a group may make no progress (no token, no score), or an actor adopt no announced weights; then the group, or all
    of the actor's, go to others."""
    max_attempts: int = Field(default=3, ge=1)
    """Times a group may end its actor, or make no progress, before it is quarantined (the last time alone); times a batch may
    end the learner before its groups are tried alone."""
    fsync: Fsync = "group"
    """When a group is acknowledged. "group": when it is on disk (one fsync for all that arrived together), so that nothing
    loses it. "off": when the operating system has it; nothing is promised when the power fails. Either way no process that dies
    loses a group."""
    segment_bytes: int = Field(default=16 << 20, ge=1 << 12)
    """Size at which the journal begins a new segment, in bytes."""
    keep_rollouts: bool = False
    """Keep every journal segment, to show, export or train on the whole run again."""

    @property
    def beat_s(self) -> float:
        """Seconds between two beats of an actor."""
        return min(1.0, self.lease_s / 5)


class WeightsConfig(Section):
    """The transport of weights from the learner to the actors."""

    transport: Literal["auto", "chunks", "device"] = "auto"
    """`auto`: in sealed memory that the processes of one machine share, else sent; `chunks`: always sent; `device`: broadcast
    by torch.distributed (on one machine, all on CPUs or each on a CUDA device of its own), and as with `auto` to engines that
    miss it or share the learner's device."""
    device_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """`device`: seconds that a broadcast may take; then it is given up, the engines fetch the set, and the next broadcast is
    without the engine that hangs."""
    delta: bool = True
    """Where sets are sent, send the changes when they are less than half of the set; an actor then keeps the previous set."""


class CurriculumConfig(Section):
    """Prompts are chosen by how often they have been solved: `reward` names their score; empty: no curriculum."""

    reward: str = ""
    """The reward, by its name, whose score decides whether a prompt is solved. Empty: prompts come in their order."""
    passes_at: float = 1.0
    """A completion solves its prompt when that score is at least this; `docs/data.md` describes the consequences."""
    retire_after: int = Field(default=2, ge=1)
    """Groups in a row that must solve a prompt every time for it to be used no more."""
    new_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the groups for prompts that were not used before, as long as there are any; 0: only when no other is left."""
    hard_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the groups that are for hard prompts, whose newest group has no solution; 0: only when no other prompt is left.
    The rest of the groups goes to all other prompts."""

    @property
    def is_on(self) -> bool:
        """Whether a reward is named."""
        return bool(self.reward)

    def check(self) -> None:
        """Check the settings against each other. Raises ConfigError."""
        if not self.is_on:
            if self != CurriculumConfig():
                raise ConfigError(
                    "data.curriculum has settings and no reward; name the one that decides what is solved: "
                    'data.curriculum.reward = "..."'
                )
            return
        if (both := self.new_share + self.hard_share) > 1:
            raise ConfigError(
                f"data.curriculum.new_share + hard_share = {both:g} is more than all groups; highest new_share: "
                f"{1 - self.hard_share:g}"
            )


class SecurityConfig(Section):
    """Who may connect to the hub. The configuration has the names of files, never their content."""

    keys: str | None = None
    """Directory made by `async-rlhf keys new`: encrypted, and only for allowed keys. Without it the hub listens on this machine
    only."""

    @property
    def directory(self) -> Path | None:
        return None if self.keys is None else Path(self.keys)
