"""What a simulation finds, and how it keeps count of what each role does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from async_rlhf.buffers.queue.ledger import Ledger

BUSY = {"decode", "adopt", "train", "publish", "score"}
"""What a role does when it does not wait. A wait is named after what ends it: credit, weights, scores, batch, completions."""
_BOUNDS = 0.9  # a role that is busy for less of its time does not bound the step by itself


@dataclass(frozen=True)
class Interval:
    """role: `learner`, `scoring` or an actor's name. doing: one of `BUSY`, or what it waits for."""

    role: str
    doing: str
    began_s: float
    ended_s: float


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

    staleness: tokens that were trained on, by their staleness in steps. queue_depth: groups ready and not taken.
    scoring_load: share of the judges' time in which they scored; 0 where their number has no limit.
    timeline: what each role did in the last few steps; the intervals of a role follow each other.
    """

    steps: int
    warm_up: int
    total_s: float
    seconds_per_step: float
    samples_per_s: float
    tokens_per_s: float
    staleness: Mapping[int, int]
    queue_depth_mean: float
    queue_depth_max: int
    roles: Mapping[str, RoleTime]
    scoring_load: float
    ledger: Ledger
    timeline: tuple[Interval, ...]

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


class Timeline:
    """Owns the intervals; keeps those that end while it `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.intervals: list[Interval] = []
        self._last: dict[str, int] = {}  # place of each role's last one

    def add(self, interval: Interval) -> None:
        """One that goes on where the last of its role ended becomes one with it."""
        if not self.is_on or interval.ended_s == interval.began_s:
            return
        place = self._last.get(interval.role)
        before = None if place is None else self.intervals[place]
        if place is not None and before and before.doing == interval.doing and before.ended_s == interval.began_s:
            self.intervals[place] = replace(before, ended_s=interval.ended_s)
        else:
            self._last[interval.role] = len(self.intervals)
            self.intervals.append(interval)


class Account:
    """What one role does, and the seconds of each since `restart`."""

    def __init__(self, role: str, timeline: Timeline, now: float, doing: str) -> None:
        self.role, self.doing, self._timeline = role, doing, timeline
        self._began, self._since, self._seconds = now, now, dict[str, float]()

    def turn_to(self, doing: str, now: float) -> None:
        """From now on it does this."""
        if doing != self.doing:
            self._add(now)
            self.doing, self._began = doing, now

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
        self._timeline.add(Interval(self.role, self.doing, self._began, now))
