"""Which place each group number has, on disk before the number exists, and how groups went: one file, only ever appended to.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.config import CurriculumConfig
from async_rlhf.buffers.curriculum.pools import Pools
from async_rlhf.buffers.errors import DamagedError, JournalError
from async_rlhf.buffers.files import DISK, Appending, Files

FILE_NAME = "order.jsonl"

Outcome = tuple[int, float | None]
"""A group number, and the share of its completions that solved the prompt."""


@dataclass(frozen=True)
class _Line:
    step: int | None
    outcomes: Sequence[Outcome]
    known: int
    first: int
    places: Sequence[int]


class Order:
    """Owns the file. Raises JournalError where it cannot be read, DamagedError where it is not as it was written."""

    def __init__(self, directory: Path, config: CurriculumConfig, max_uses: int | None = None, files: Files = DISK) -> None:
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
        self._decided: _Line | None = None
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
        """Of a number that has one."""
        return self._places[number]

    def not_judged_below(self, number: int) -> list[int]:
        """Numbers below this one of which no outcome has come, in order."""
        return sorted(each for each in self._not_judged if each < number)

    def describe(self, step: int | None = None) -> dict[str, float]:
        """As `Pools.describe`. step: as it was before this batch counted, where it has."""
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
                self._decided = _Line(step, outcomes, known, first, places)
                self._unwritten = _written(self._decided)
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

    def _bind(self, line: _Line) -> None:
        self._not_judged.update(range(line.first, line.first + len(line.places)))
        self._places.extend(line.places)
        if line.step is not None:
            self.num_steps = line.step + 1

    # -- the file ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """What was decided goes to disk, and exists then. Raises OSError."""
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


def _written(line: _Line) -> bytes:
    record = {
        "step": line.step, "outcomes": line.outcomes, "known": line.known, "first": line.first, "places": line.places,
    }  # fmt: skip
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parsed(data: bytes) -> _Line | None:
    """None for what is no line of this file."""
    try:
        found: dict[str, Any] = json.loads(data) if data.endswith(b"\n") else {}
        outcomes = [(int(number), rate) for number, rate in found["outcomes"]]
        return _Line(
            found["step"], outcomes, int(found["known"]), int(found["first"]), [int(place) for place in found["places"]]
        )
    except (ValueError, TypeError, KeyError):
        return None
