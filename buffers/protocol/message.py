"""What every message is: a frozen record whose fields are checked before anything looks at them.

Types are strict: a text is no number, a float no integer, 1 no truth value. Every integer fits what it is made of again:
64 bits in a header, 32 bits where it becomes an array.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=200)]
Int = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Version = Annotated[int, Field(ge=-(1 << 31), le=(1 << 31) - 1)]
Amount = Annotated[float, Field(ge=-1e18, le=1e18)]
"""Sums and squares of as many as there are stay finite."""
GroupId = Annotated[tuple[Count, Count], Field(strict=False)]
"""(number, attempt)"""


class MessageBase(BaseModel):
    """Unknown fields, other types, and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class CreditItem(MessageBase):
    """Permission to begin a group. row: its prompt and columns, a JSON object, where rows come while the run goes on. place: of
    its row in the first epoch, where a curriculum chooses among the rows of the run."""

    number: Count
    attempt: Count
    lowest_version: Version
    row: str = ""
    place: Count | None = None


class Telemetry(MessageBase):
    """An actor's counters and gauges, the same of every actor. `*_total` and `*_s` only rise in an actor's life.

    scoring: completions that wait for scores. canary_drift: nats between engine and learner at the newest adoption.
    episodes_*: whose environment failed, and those that began again because its process ended. cleanups_failed: environments
    whose `finally` failed.
    selection_*: how much what is trained differs in length from what was begun, in tokens, and in turns (see
    `async_rlhf.actors.loop.length_bias`).
    """

    busy_s: Amount = 0.0
    idle_s: Amount = 0.0
    tokens_total: Amount = 0.0
    completions_total: Amount = 0.0
    groups_total: Amount = 0.0
    dropped_tokens_total: Amount = 0.0
    canary_drift: Amount = 0.0
    selection_ks: Amount = 0.0
    selection_mean_ratio: Amount = 0.0
    selection_correlation: Amount = 0.0
    selection_alarm: Amount = 0.0
    selection_turns_ks: Amount = 0.0
    selection_turns_mean_ratio: Amount = 0.0
    selection_turns_correlation: Amount = 0.0
    selection_turns_alarm: Amount = 0.0
    oldest_group_age: Amount = 0.0
    scoring: Amount = 0.0
    scores_failed_total: Amount = 0.0
    scores_asked_again_total: Amount = 0.0
    shown_total: Amount = 0.0
    shown_not_read_total: Amount = 0.0
    episodes_failed_total: Amount = 0.0
    episodes_lost_total: Amount = 0.0
    cleanups_failed_total: Amount = 0.0
