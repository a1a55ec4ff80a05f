"""One reading of a run: what its files hold, for all that show it or send it on; they select and draw.

attribute      file                lines
steps          metrics.jsonl       a step of the learner
evaluations    evaluations.jsonl   an evaluation
samples        rollouts.jsonl      a sampled group; `groups` are checked ones
spans()        spans/ACTOR.jsonl   an idle stretch or an adopted version, by actor
changes        changes.jsonl       as they stand there; `ledger` is what they come to
events         events.jsonl        what may need a person
quarantined    quarantine.jsonl    a group that was given up, and why

`whole` gives all lines of a file. `rest` gives those that were added since it was asked before: at first all, or where the
reading is brief its end, and of a long metrics.jsonl steps at even distances before that. Reading raises DamagedError where it
is no regular file; it may be missing, and what is no record is left out and counted (`run_files`). Small files are read by
`RunDir`. Writes nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ValidationError

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.learner.loop.changes import ChangeLedger, described
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Line, Tail, is_step, open_regular, parsed, read_lines, stamp

MOST_EVENTS = 200
"""Of each file of events, so many are kept."""
_GROUPS, _SPANS, _MOST_ACTORS = 24, 400, 64
_END = 1 << 20
_WHOLE_BYTES, _PLACES, _WINDOW = 24 << 20, 1500, 16 << 10
"""Of steps that are read from their beginning; of longer files so many places are read, of so many bytes each."""


class Steps(Tail):
    """The records of steps; they rise, but for those of a learner that started again.

    is_spread: of a long file those at even distances and at its end are read at first, in a second or two.
    """

    def __init__(self, path: Path, *, brief: bool) -> None:
        super().__init__(path)
        self._brief, self.is_spread = brief, False

    def drawn(self) -> list[Line]:
        """The lines for a plot of the whole run. Raises DamagedError for a damaged line in a file that is read whole."""
        return list(Steps(self.path, brief=True).rest()) if self._is_long() else read_lines(self.path, all_good=True)

    def rest(self) -> Iterator[Line]:
        is_brief, self._brief = self._brief and self._is_long(), False
        if not is_brief:
            yield from filter(is_step, super().rest())
            return
        self.is_spread, self._last, newest = True, _END, -1
        for record in filter(is_step, chain(self._spread(), super().rest())):
            if record["step"] > newest:  # windows may overlap
                newest = record["step"]
                yield record

    def _is_long(self) -> bool:
        return os.path.isfile(self.path) and os.path.getsize(self.path) > _WHOLE_BYTES

    def _spread(self) -> Iterator[Line]:
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(0, size - _END, -(-size // _PLACES)):
                file.seek(offset)
                if offset:
                    file.readline(_WINDOW)
                yield from filter(None, map(parsed, io.BytesIO(file.read(_WINDOW))))  # the last is cut, and none


class Reading:
    """Reads one run. brief: for displays of a running run, in bounded memory and time."""

    def __init__(self, run: RunDir, *, brief: bool = False) -> None:
        self.run, self._last = run, _END if brief else None
        self.ledger = ChangeLedger(run.path)
        self._config: tuple[object, Config] | None = None
        self.steps = Steps(run.metrics, brief=brief)
        self.evaluations, self.samples = self._file("evaluations", MOST_EVENTS), self._file("rollouts", _GROUPS)
        self.changes, self.events = self._file("changes", MOST_EVENTS), self._file("events", MOST_EVENTS)
        self.quarantined = self._file("quarantine", MOST_EVENTS)
        self._spans: dict[str, Tail] = {}

    def config(self) -> Config:
        """That of the run, read where it has changed. Raises ConfigError, DamagedError."""
        now = stamp(self.run.config_file)
        if self._config is None or self._config[0] != now:
            self._config = now, self.run.config()
        return self._config[1]

    def spans(self) -> Mapping[str, Tail]:
        """By actor, also of those that have joined since; of the first `_MOST_ACTORS` where the reading is brief."""
        with suppress(OSError):
            for path in sorted((self.run.path / "spans").glob("*.jsonl"))[: self._last and _MOST_ACTORS]:
                self._spans.setdefault(path.stem, self._file(f"spans/{path.stem}", _SPANS))
        return self._spans

    @staticmethod
    def newest(path: Path, shape: type[BaseModel], problems: list[str], window: int = _END) -> list[Line]:
        """The last records of a file, in `window` bytes or, where a record is longer, in more. Of another shape they are left
        out, and with damaged lines counted in `problems`. Raises DamagedError."""
        for size in (window, _END):
            tail = Tail(path, size)
            if found := list(tail.rest()):
                break
        good = list[Line]()
        for record in found:
            with suppress(ValidationError):
                shape.model_validate(record)
                good.append(record)
        if bad := tail.unreadable + len(found) - len(good):
            problems.append(f"{path}: {bad} of its last {tail.num_lines} lines")
        return good

    def groups(self) -> Iterator[Line]:
        """All sampled groups that are there, in the order of training. Raises DamagedError for a file with other lines."""
        for line in self.samples.whole():
            if not is_step(line) or type(line.get("group")) is not int:
                raise DamagedError(f"{self.run.samples} is damaged: a line is no sample of a group")
            yield line

    def changed(self) -> list[int]:
        """The steps from which on something was changed, and still is. Raises DamagedError."""
        return sorted({change.step for change in self.ledger.read().changes if change.step is not None})

    def changes_in_words(self) -> list[str]:
        """A line each. Raises DamagedError."""
        return [described(change) for change in self.ledger.read().changes]

    def refresh(self, take: Callable[[Line], object]) -> list[str]:
        """Read on: new steps go to `take`, of what else is shown the newest lines are kept. Returns what cannot be read."""
        shown = (self.samples, self.changes, self.events, self.quarantined, *self.spans().values())
        problems = list[str]()

        def steps() -> None:
            for record in self.steps.rest():
                take(record)

        for read in (steps, *(file.refresh for file in shown)):
            try:
                read()
            except (DamagedError, OSError) as error:
                problems.append(str(error))
        damaged = [file for file in (self.steps, self.samples) if file.unreadable]
        return problems + [f"{file.path.name}: damaged lines that are left out: {file.unreadable}" for file in damaged]

    def _file(self, name: str, keep: int) -> Tail:
        return Tail(self.run.path / f"{name}.jsonl", self._last, keep if self._last else 0)
