"""The budget of a run and the used part of it: the learner decides by it between two steps, everything else by what
the learner has recorded.

Tokens are those that were trained on, not those that were generated: what is trained on follows from the configuration, and is
the same however often a process dies; what actors have generated when a step ends depends on how far ahead they are. The two
differ only by what waits in the queue then and what was given up, and the ledger counts both. Seconds are the sum of the steps'
times: a resumed run goes on counting, and neither the time between two starts counts nor steps that a killed learner lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spent:
    """The used part of a run's budget: learner steps, completion tokens trained on, seconds of the learner."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def until(cls, record: Mapping[str, Any]) -> Spent:
        """The budget used up to and including the step of this line of `metrics.jsonl`. Missing values count as 0."""
        steps, tokens, seconds = (record.get(name) for name in ("step", "num_tokens_total", "step_time_total"))
        return cls(
            steps if isinstance(steps, int) else 0,
            tokens if isinstance(tokens, int) else 0,
            seconds if isinstance(seconds, int | float) else 0.0,
        )

    @classmethod
    def before(cls, record: Mapping[str, Any]) -> Spent:
        """The budget used before the step of this line."""
        now = cls.until(record)
        one = cls.until({"num_tokens_total": record.get("num_tokens"), "step_time_total": record.get("step_time")})
        return cls(now.steps - 1, now.tokens - one.tokens, now.seconds - one.seconds)


@dataclass(frozen=True)
class Budget:
    """The step that uses up one of the three limits is the last; a run without any limit has no end of its own."""

    max_steps: int | None = None
    max_trained_tokens: int | None = None
    max_seconds: float | None = None

    @property
    def may_cut_steps(self) -> bool:
        """Whether anything but `max_steps` can end a run."""
        return self.max_trained_tokens is not None or self.max_seconds is not None

    def ended(self, spent: Spent) -> str:
        """Why no step follows; empty while one may."""
        for key, limit, used in self._limits(spent):
            if used >= limit:
                return "all steps done" if key == "max_steps" else f"{key} = {limit:.10g} reached"
        return ""

    def exceeds(self, other: Budget) -> bool:
        """Whether a run that has used up the other may go on with this one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return any(theirs is not None and (own is None or own > theirs) for own, theirs in pairs)

    def num_steps(self, spent: Spent) -> int | None:
        """The number of steps that the run will have at the pace at which it has used its budget so far; None while that
        is open."""
        ends = [
            limit if key == "max_steps" else spent.steps * limit / used
            for key, limit, used in self._limits(spent)
            if key == "max_steps" or (spent.steps and used > 0)
        ]
        return max(spent.steps, math.ceil(min(ends))) if ends else None

    def _limits(self, spent: Spent) -> list[tuple[str, float, float]]:
        """(key, limit, used part) of each limit that is set."""
        known = zip(vars(self).items(), vars(spent).values(), strict=True)
        return [(key, limit, used) for (key, limit), used in known if limit is not None]
