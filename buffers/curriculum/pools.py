"""Which place comes next: a pure fold over what was chosen and how it went. No clock, file or random number.

A place is a prompt as the data have it: a place of the first epoch of a file or task, or of a spool's stream. It is

    new      never used. New places come in their order
    open     its newest group solved it sometimes; or easy and not yet retired; or it is not known how it went
    hard     its newest group solved it at most `hard_at` of the time
    away     chosen, and how it went is not known yet
    retired  easy (solved at least `easy_at` of the time) `retire_after` groups in a row: for good
    used up  chosen `max_uses` times: for good

Rule: number n is for hard, new or open, by where the n-th point of the golden rotation falls in [0, 1), cut at `hard_share`
and `hard_share + new_share`. The first of that pool comes; of an empty one the next of open, new, hard, away. What comes back
goes to the end of its pool.

Why none starves. The rotation visits each interval of length w once in at most 3 / w consecutive numbers (its gaps are sums of
neighbouring Fibonacci numbers, by the three-gap theorem). A pool is first in, first out, so the k-th place of a pool with
share w comes after at most 3 k / w numbers. A point follows from the number alone: nothing of the rule has to be remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from async_rlhf.buffers.config import CurriculumConfig

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 times the golden ratio's fraction, made odd: numbers beyond 2^53 keep their points


def pass_rate(scores: Sequence[float | str | None], passes_at: float) -> float | None:
    """Share of a group's scores that are at least `passes_at`. Failed ones (a text) and None do not count; None without any."""
    values = [score for score in scores if isinstance(score, float)]
    return sum(value >= passes_at for value in values) / len(values) if values else None


def point(number: int) -> float:
    """Where a number falls in [0, 1): consecutive ones fill it evenly."""
    return ((number + 1) * _GOLDEN & ((1 << 64) - 1)) / (1 << 64)


@dataclass
class _Used:
    """A place that was chosen at least once. easy: groups in a row that were."""

    uses: int = 0
    easy: int = 0
    rate: float | None = None


class Pools:
    """See the module docstring. num_known: how many places there are; it may be raised, never lowered."""

    def __init__(self, config: CurriculumConfig, max_uses: int | None = None) -> None:
        self._config, self._max_uses = config, max_uses
        self.num_known = 0
        self._next_new = 0
        self._used: dict[int, _Used] = {}
        self._open, self._hard, self._away = OrderedDict[int, None](), OrderedDict[int, None](), OrderedDict[int, None]()
        self._retired = self._num_hard = self._num_judged = 0
        self._sum_rates = 0.0

    def choose(self, number: int) -> int | None:
        """The place for this number; None when all are retired or used up. Changes nothing: `use` does."""
        new = self._next_new if self._next_new < self.num_known else None
        first = {"open": _first(self._open), "new": new, "hard": _first(self._hard), "away": _first(self._away)}
        found = first[self._turn(point(number))]
        return found if found is not None else next((place for place in first.values() if place is not None), None)

    def use(self, place: int) -> None:
        """A number has this place."""
        self._next_new += place == self._next_new
        used = self._used.setdefault(place, _Used())
        used.uses += 1
        self._leave(place)
        if self._may_come(used):
            self._away[place] = None

    def learn(self, place: int, rate: float | None) -> None:
        """How a group of this place went: the share that solved it, None where it is not known."""
        used = self._used[place]
        was_retired = self._is_retired(used)
        if rate is not None:
            self._count(used, -1)
            used.rate = rate
            if not was_retired:  # for good, however groups that were begun before go
                used.easy = used.easy + 1 if rate >= self._config.easy_at else 0
            self._count(used, 1)
        self._retired += self._is_retired(used) - was_retired
        self._leave(place)
        if self._may_come(used):
            (self._hard if self._is_hard(used) else self._open)[place] = None

    def describe(self) -> dict[str, float]:
        """For people. places: known; retired, hard: so many of them; pass_rate: mean of the newest of each that has one."""
        return {
            "places": self.num_known,
            "new": self.num_known - self._next_new,
            "retired": self._retired,
            "hard": self._num_hard,
            "pass_rate": self._sum_rates / self._num_judged if self._num_judged else 0.0,
        }

    def _turn(self, at: float) -> str:
        if at < self._config.hard_share:
            return "hard"
        return "new" if at < self._config.hard_share + self._config.new_share else "open"

    def _leave(self, place: int) -> None:
        for pool in (self._open, self._hard, self._away):
            pool.pop(place, None)

    def _count(self, used: _Used, by: int) -> None:
        if used.rate is not None:
            self._num_judged += by
            self._num_hard += by * self._is_hard(used)
            self._sum_rates += by * used.rate

    def _may_come(self, used: _Used) -> bool:
        return not self._is_retired(used) and (self._max_uses is None or used.uses < self._max_uses)

    def _is_retired(self, used: _Used) -> bool:
        return used.easy >= self._config.retire_after

    def _is_hard(self, used: _Used) -> bool:
        return used.rate is not None and used.rate <= self._config.hard_at


def _first(pool: OrderedDict[int, None]) -> int | None:
    return next(iter(pool), None)
