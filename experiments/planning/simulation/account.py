"""What a simulation finds, and how it keeps count of what each role does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rlhf.buffers.queue.ledger import Ledger

BUSY = {"decode", "adopt", "train", "publish", "score"}
"""What a role does when it does not wait. A wait is named after what ends it: credit, weights, scores, batch, completions."""
_BOUNDS = 0.9  # a role that is busy for less of its time does not bound the step by itself


@dataclass(frozen=True)
class RoleTime:
    """shares: of the role's time, by what it does or waits for; they add up to 1."""

    shares: Mapping[str, float]

    @property
    def idle(self) -> float:
        return sum(share for doing, share in self.shares.items() if doing not in BUSY)

    @property
    def waits_for(self) -> str:
        """What most of its idle time ends by; "" where it never waits."""
        waits = {doing: share for doing, share in self.shares.items() if doing not in BUSY and share > 0}
        return max(waits, key=lambda doing: waits[doing], default="")


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Rates, shares and means are over the steps behind the warm-up; the ledger and `total_s` are of all.

    staleness: tokens that were trained on, by their staleness in steps. queue_depth: groups ready and not taken. roles:
    `learner`, `scoring` and the actors by name. scoring_load: share of the judges' time in which they scored; 0 where their
    number has no limit.
    """

    steps: int
    warm_up: int
    total_s: float
    seconds_per_step: float
    samples_per_s: float
    staleness: Mapping[int, int]
    queue_depth_mean: float
    queue_depth_max: int
    roles: Mapping[str, RoleTime]
    scoring_load: float
    ledger: Ledger

    @property
    def staleness_mean(self) -> float:
        tokens = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / tokens if tokens else 0.0

    @property
    def bound_by(self) -> str:
        """`learner`, `scoring` or `actors`, whichever is busy nearly always; else `max_staleness`: once around binds, as each
        role waits for another."""
        actors = [1 - time.idle for name, time in self.roles.items() if name not in ("learner", "scoring")]
        busy = {
            "actors": sum(actors) / len(actors) if actors else 0.0,
            "scoring": self.scoring_load,
            "learner": 1 - self.roles["learner"].idle,
        }
        name = max(busy, key=lambda name: busy[name])
        return name if busy[name] >= _BOUNDS else "max_staleness"


class Account:
    """What one role does, and the seconds of each since `restart`."""

    def __init__(self, now: float, doing: str) -> None:
        self.doing, self._since, self._seconds = doing, now, dict[str, float]()

    def turn_to(self, doing: str, now: float) -> None:
        """From now on it does this."""
        if doing != self.doing:
            self._add(now)
            self.doing = doing

    def restart(self, now: float) -> None:
        self._seconds, self._since = {}, now

    def close(self, now: float) -> RoleTime:
        """What it does ends now."""
        self._add(now)
        total = sum(self._seconds.values())
        return RoleTime({doing: seconds / total for doing, seconds in self._seconds.items() if seconds > 0} if total else {})

    def _add(self, now: float) -> None:
        self._seconds[self.doing] = self._seconds.get(self.doing, 0.0) + now - self._since
        self._since = now
