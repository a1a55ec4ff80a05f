"""One reward's verdict on one completion. Imports nothing heavy, because every process that judges carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any, Literal

from async_rlhf.buffers.errors import RecordError

MAX_SCORE = 1e18
"""Beyond it sums and squares of a batch's scores would overflow in float32."""


@dataclass(frozen=True)
class Score:
    """A value, not applicable (`Score()`), or failed for a reason.

    A failed score is never a number: it is left out of every mean and counted.
    """

    value: float | None = None
    failure: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further finite numbers about the completion, reported beside the reward and never trained on."""

    def __post_init__(self) -> None:
        if self.value is not None and self.failure is not None:
            raise RecordError(f"a score is a value or a failure, not both: value {self.value}, failure {self.failure!r}")
        if self.value is not None and not _is_score(self.value):
            raise RecordError(
                f"a score must be finite and within +-{MAX_SCORE:g}, got {self.value!r:.60}; "
                "return None for 'not applicable' or raise"
            )
        if not isinstance(self.metrics, Mapping):
            raise RecordError(f"metrics of a score are a dictionary of numbers by name, got {self.metrics!r:.60}")
        for name, value in self.metrics.items():
            if not _is_score(value):
                raise RecordError(
                    f"metric {name!r} of a score must be finite, within +-{MAX_SCORE:g}, got {value!r:.60}; leave it out"
                )

    @property
    def state(self) -> Literal["value", "not_applicable", "failed"]:
        if self.failure is not None:
            return "failed"
        return "not_applicable" if self.value is None else "value"


def _is_score(value: Any) -> bool:
    """Whether it is a finite real number within the limit, of any package."""
    try:
        return bool(-MAX_SCORE <= value <= MAX_SCORE) and (isinstance(value, Real) or not isinstance(value, Complex))
    except (TypeError, ValueError, RuntimeError):
        return False
