"""One reward's verdict on one completion. Imports nothing heavy, because every process that judges carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from async_rlhf.buffers.errors import RecordError

MAX_SCORE = 1e18
"""Beyond it sums and squares of a batch's scores would overflow in float32."""


@dataclass(frozen=True)
class Score:
    """A value, not applicable (`Score()`), or failed for a reason.

    A failed score is never a number: it is left out of every mean and counted. metrics: further finite numbers about the
    completion, reported beside the reward and never trained on.
    """

    value: float | None = None
    failure: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.value is not None and self.failure is not None:
            raise RecordError(f"a score is a value or a failure, not both: value {self.value}, failure {self.failure!r}")
        if self.value is not None and not abs(self.value) <= MAX_SCORE:  # nor is it true of what is not a number
            raise RecordError(
                f"a score must be finite and within +-{MAX_SCORE:g}, got {self.value}; "
                "return None for 'not applicable' or raise"
            )
        for name, value in self.metrics.items():
            if not abs(value) <= MAX_SCORE:
                raise RecordError(
                    f"metric {name!r} of a score must be finite, within +-{MAX_SCORE:g}, got {value}; leave it out"
                )

    @property
    def state(self) -> Literal["value", "not_applicable", "failed"]:
        if self.failure is not None:
            return "failed"
        return "not_applicable" if self.value is None else "value"
