"""Which prompt a group number has where that is chosen by how often prompts have been solved. `Pools` is the rule, a pure fold
over what was chosen and how it went: no clock, file or random number. `Order` keeps what it decided: which place each number
has, on disk before the number exists, and how groups went, in one file that is only ever appended to.

A place is a prompt as the data have it: a place of the first epoch of a file or task, or of a spool's stream. It is

    new      never used. New places come in their order
    open     its newest group solved it sometimes; or easy and not yet retired; or it is not known how it went
    hard     its newest group never solved it
    away     chosen, and how it went is not known yet
    retired  easy (solved every time) `retire_after` groups in a row: for good
    used up  chosen `max_uses` times: for good

Rule: number n is for hard, new or open, by where the n-th point of the golden rotation falls in [0, 1), cut at `hard_share`
and `hard_share + new_share`. The first of that pool comes; of an empty one the next of open, new, hard, away. What comes back
goes to the end of its pool.

Why none starves. The rotation visits each interval of length w once in at most 3 / w consecutive numbers (its gaps are sums of
neighbouring Fibonacci numbers, by the three-gap theorem). A pool is first in, first out, so the k-th place of a pool with
share w comes after at most 3 k / w numbers. A point follows from the number alone: nothing of the rule has to be remembered.

    order.jsonl   {"step":3,"outcomes":[[12,0.5],[13,null]],"known":4096,"first":24,"places":[17,3,18,19]}

A line has, in this order: how groups went (number, share that solved the prompt, null where it is not known), how many places
were known, and which place each number from `first` on has. `step` is the batch whose groups these outcomes are of, the
quarantined ones below included; null where groups were filtered: their outcomes wait for the line of the next batch. An outcome
counts once for a number.

So the policy's state is a fold over the file (`Pools`), whatever died when. What a crash left of the newest line is cut off
when the file is opened: its numbers did not exist yet. What a full disk did not take is written first when there is room.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.config import CurriculumConfig
from async_rlhf.buffers.errors import DamagedError, JournalError
from async_rlhf.buffers.files import DISK, Appending, Disk

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 times the golden ratio's fraction, made odd: numbers beyond 2^53 keep their points


def pass_rate(scores: Sequence[float | str | None], passes_at: float) -> float | None:
    """Share of a group's scores that are at least `passes_at`. Failed ones (a text) and None do not count; None without any."""
    values = [score for score in scores if isinstance(score, float)]
    return sum(value >= passes_at for value in values) / len(values) if values else None


def point(number: int) -> float:
    """The place of a number in [0, 1); consecutive numbers fill it evenly."""
    return ((number + 1) * _GOLDEN & ((1 << 64) - 1)) / (1 << 64)


@dataclass
class _Used:
    """A place that was chosen at least once."""

    uses: int = 0
    easy: int = 0
    """Newest groups in a row that were easy."""
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
        """Learn the result of a group of this place: the share that solved it, None where it is not known."""
        used = self._used[place]
        was_retired = self._is_retired(used)
        if rate is not None:
            self._count(used, -1)
            used.rate = rate
            if not was_retired:  # for good, however groups that were begun before go
                used.easy = used.easy + 1 if rate == 1 else 0
            self._count(used, 1)
        self._retired += self._is_retired(used) - was_retired
        self._leave(place)
        if self._may_come(used):
            (self._hard if self._is_hard(used) else self._open)[place] = None

    def describe(self) -> dict[str, float]:
        """Numbers for people. places: known ones; retired, hard: their counts; pass_rate: mean of the newest of each place."""
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
        return used.rate == 0


def _first(pool: OrderedDict[int, None]) -> int | None:
    return next(iter(pool), None)


FILE_NAME = "order.jsonl"

Outcome = tuple[int, float | None]
"""A group number, and the share of its completions that solved the prompt."""


@dataclass(frozen=True)
class _PromptLine:
    step: int | None
    outcomes: Sequence[Outcome]
    known: int
    first: int
    places: Sequence[int]


class Order:
    """Owns the file. Raises JournalError where it cannot be read, DamagedError where it is not as it was written."""

    def __init__(self, directory: Path, config: CurriculumConfig, max_uses: int | None = None, files: Disk = DISK) -> None:
        """max_uses: most numbers that one place may have; None: any."""
        self._path, self._files = directory / FILE_NAME, files
        self._pools = Pools(config, max_uses)
        self._places = array("Q")  # of every number
        self._not_judged: set[int] = set()
        self._filtered: list[Outcome] = []  # they count with the next batch
        self._before = array("d")  # what was known before each batch
        self.num_steps = 0
        """How many batches have been counted."""
        self._unwritten = b""  # decided, and not on disk yet
        self._decided: _PromptLine | None = None
        self._file = Appending(self._path, files)
        try:
            files.make(directory)
            if self._path.name in files.names(directory):
                self._read()
            files.sync_path(directory)  # a process that was killed may have left that undone
        except OSError as error:
            raise JournalError(f"{self._path} cannot be read: {error}; mend the disk, then resume the run") from error

    @property
    def num_numbers(self) -> int:
        """How many numbers have a place."""
        return len(self._places)

    def place(self, number: int) -> int:
        """The place of a number that has one."""
        return self._places[number]

    def not_judged_below(self, number: int) -> list[int]:
        """Numbers below this one of which no outcome has come, in order."""
        return sorted(each for each in self._not_judged if each < number)

    def describe(self, step: int | None = None) -> dict[str, float]:
        """`Pools.describe`; with `step`, of the state before this batch was counted, if it was."""
        now = self._pools.describe()
        if step is None or step >= self.num_steps:
            return now
        return dict(zip(now, self._before[step * len(now) : (step + 1) * len(now)], strict=True))

    def append(self, target: int, known: int, outcomes: Iterable[Outcome] = (), step: int | None = None) -> bool:
        """There are `known` places; let numbers below `target` have theirs. On disk when it returns, where anything is new.

        outcomes: of batch `step`, or of filtered groups. Returns whether every place is retired or used up, so that no further
        number comes. Raises OSError: nothing that is not on disk has happened then, and what was decided is written first next
        time.
        """
        self._write()
        if step is not None and step < self.num_steps:  # what was written just now
            step = None
        outcomes = sorted({number: rate for number, rate in outcomes if number in self._not_judged}.items())
        first = len(self._places)
        if step is not None or outcomes or first < target:
            self._learn(step, outcomes, known)
            places = self._choose(first, target)
            if step is not None or outcomes or places:
                self._decided = _PromptLine(step, outcomes, known, first, places)
                self._unwritten = json.dumps(vars(self._decided), separators=(",", ":"), allow_nan=False).encode() + b"\n"
                self._write()
        return self._pools.choose(len(self._places)) is None

    def close(self) -> None:
        self._file.close()

    # -- the fold ----------------------------------------------------------------------------------------------------

    def _learn(self, step: int | None, outcomes: Iterable[Outcome], known: int) -> None:
        self._filtered += outcomes
        self._not_judged.difference_update(number for number, _ in outcomes)
        if step is not None:
            self._before.extend(self._pools.describe().values())
            for number, rate in sorted(self._filtered):
                self._pools.learn(self._places[number], rate)
            self._filtered.clear()
        self._pools.num_known = known

    def _choose(self, first: int, target: int) -> list[int]:
        places: list[int] = []
        for number in range(first, target):
            if (place := self._pools.choose(number)) is None:
                break
            self._pools.use(place)
            places.append(place)
        return places

    def _bind(self, line: _PromptLine) -> None:
        self._not_judged.update(range(line.first, line.first + len(line.places)))
        self._places.extend(line.places)
        if line.step is not None:
            self.num_steps = line.step + 1

    # -- the file ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the decision to disk, then apply it. Raises OSError."""
        if self._decided is None:
            return
        self._file.append(self._unwritten)
        self._bind(self._decided)
        self._decided = None

    def _read(self) -> None:
        data, start = self._files.read(self._path), 0
        while start < len(data):
            end = data.find(b"\n", start) + 1
            line = _parsed(data[start:end])
            if line is None and end in (0, len(data)):
                break
            if line is None or line.first != len(self._places):
                raise DamagedError(f"{self._path} is damaged at byte {start}. Restore it from a copy")
            self._learn(line.step, line.outcomes, line.known)
            for place in line.places:
                self._pools.use(place)
            self._bind(line)
            start = end
        self._file.cut(start)
        self._files.sync_path(self._path)


def _parsed(data: bytes) -> _PromptLine | None:
    """None for what is no line of this file."""
    try:
        line: dict[str, Any] = json.loads(data) if data.endswith(b"\n") else {}
        outcomes = [(int(number), rate) for number, rate in line["outcomes"]]
        return _PromptLine(line["step"], outcomes, int(line["known"]), int(line["first"]), list(map(int, line["places"])))
    except (ValueError, TypeError, KeyError):
        return None
