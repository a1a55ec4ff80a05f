"""The ledger of changes: an operator's changes to a running run, and the first step of each.

`changes.jsonl` in the run directory, one object a line, only ever appended to:

    asked    number, values {key: [old, new]}   the operator: `async-rlhf set`
    applied  number, step                       the learner: this step and all after it are made with the new values
    reached  step                               a learner that begins again: so far its past lives have come
    undone   step                               the run goes back: what was applied to steps after this one is forgotten

    owns        the file, while it holds its lock (flock): who appends reads first, so that numbers and steps are in order
    waits for   another process that appends, which does nothing else meanwhile; the learner waits for none and tries again at
                the next border
    on close    what was appended is durable; the beginning of a line that a power failure left is cut off by the next

A step that may have been made already is always made again with the values it had: versions that came of it may have made
groups which are still queued. So `applied` is durable before its step begins, and a learner that begins again applies what it
finds waiting behind all steps that its past lives recorded, and one more, which they may have made without recording it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import Appending

_log = logging.getLogger(__name__)
_MAX_BYTES = 16 << 20
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class _ChangeLine(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)
    time: float = Field(default_factory=time.time)


class ChangeRequest(_ChangeLine):
    kind: Literal["asked"] = "asked"
    number: Count
    """Counted from 1."""
    values: dict[str, tuple[Any, Any]]
    """Old and new value by dotted key of the configuration."""


class Applied(_ChangeLine):
    kind: Literal["applied"] = "applied"
    number: Count
    step: Count
    """The first step that is made with it, counted from 1."""


class ReachedStep(_ChangeLine):
    kind: Literal["reached"] = "reached"
    step: Count
    """The highest step that the learner's past lives recorded."""


class Undone(_ChangeLine):
    kind: Literal["undone"] = "undone"
    step: Count
    """The last step that still counts."""


Line = ChangeRequest | Applied | ReachedStep | Undone
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
Stamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class Change:
    """A requested change, and the first step that is made with it; None while it waits."""

    number: int
    values: Mapping[str, tuple[Any, Any]]
    step: int | None = None


@dataclass(frozen=True)
class ChangeHistory:
    """The sum of a ledger's lines: the changes that count, in the order of their numbers, the last number given, and the
    highest step of the learner's past lives."""

    changes: tuple[Change, ...] = ()
    last_number: int = 0
    reached: int = 0

    def then(self, lines: Iterable[Line]) -> ChangeHistory:
        changes = {each.number: each for each in self.changes}
        last_number, reached = self.last_number, self.reached
        for line in lines:
            match line:
                case ChangeRequest():
                    changes[line.number] = Change(line.number, line.values)
                    last_number = max(last_number, line.number)
                case Applied():
                    if line.number in changes:
                        changes[line.number] = replace(changes[line.number], step=line.step)
                case ReachedStep():
                    reached = max(reached, line.step)
                case Undone():
                    changes = {n: each for n, each in changes.items() if each.step is None or each.step <= line.step}
                    reached = min(reached, line.step)
        return ChangeHistory(tuple(changes.values()), last_number, reached)

    def num_in_force(self, step: int) -> int:
        """Changes with which `step` is made."""
        return sum(change.step is not None and change.step <= step for change in self.changes)

    def in_force(self, step: int) -> dict[str, Any]:
        """The changed values with which `step` is made."""
        return _values(each for each in self.changes if each.step is not None and each.step <= step)

    def asked(self) -> dict[str, Any]:
        """The changed values with which the run goes on, those that wait included."""
        return _values(self.changes)

    def apply(self, step: int) -> list[Line]:
        """Lines by which all that waits is applied from this step on."""
        return [Applied(number=each.number, step=step) for each in self.changes if each.step is None]


def _values(changes: Iterable[Change]) -> dict[str, Any]:
    return {key: new for change in changes for key, (_, new) in change.values.items()}


class ChangeLedger:
    """The file. Raises DamagedError unless it is a regular file of bounded size, and for an unknown line: a step made without
    that line would be another step."""

    def __init__(self, run: Path) -> None:
        self.path = run / "changes.jsonl"
        self._read: tuple[Stamp, ChangeHistory] = None, ChangeHistory()

    @property
    def stamp(self) -> Stamp:
        """(inode, size, time) of the file, which differs after every change; None without a file."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self) -> ChangeHistory:
        """The history in the file, which is read again only when it has changed."""
        stamp = self.stamp  # taken before reading: lines appended in between are read the next time
        if stamp is None:
            return ChangeHistory()
        if stamp != self._read[0]:
            try:
                with self._open() as file:
                    self._read = stamp, self._history(file.read())
            except FileNotFoundError:
                return ChangeHistory()
        return self._read[1]

    def append(self, decide: Callable[[ChangeHistory], Sequence[Line]], *, wait: bool = True) -> ChangeHistory:
        """Add the lines that `decide` makes from the history; durable when it returns. wait: for another process that appends.
        Raises OSError, BlockingIOError without `wait`; nothing is added then."""
        with self._open(os.O_RDWR | os.O_CREAT) as file:  # network file systems lock only files that are open for writing
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = file.read()
            history, end = self._history(data), data.rfind(b"\n") + 1
            if not (lines := decide(history)):
                return history
            with closing(Appending(self.path)) as appending:
                try:
                    appending.cut(end)
                    appending.append("".join(f"{line.model_dump_json()}\n" for line in lines).encode())
                except OSError:
                    with suppress(OSError):
                        appending.cut(end)
                    raise
        return history.then(lines)

    def _open(self, flags: int = os.O_RDONLY) -> IO[bytes]:
        """The file, unbuffered; never waits for the other end of a pipe."""
        descriptor = os.open(self.path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            os.close(descriptor)
            raise DamagedError(f"{self.path} is no regular file of at most {_MAX_BYTES} bytes")
        return os.fdopen(descriptor, "rb", buffering=0)

    def _history(self, data: bytes) -> ChangeHistory:
        whole = data[: data.rfind(b"\n") + 1].splitlines()
        try:
            return ChangeHistory().then(_LINE.validate_json(line) for line in whole)
        except ValidationError as error:
            raise DamagedError(f"{self.path} is damaged: {error.errors()[0]['msg']}; restore it from a copy") from error


class LiveChanges:
    """The ledger as the learner sees it. step: of its checkpoint. reached: the highest step in the metrics, before they are cut
    to that. Raises OSError and DamagedError where it begins; later it goes on with what it has read."""

    def __init__(self, run: Path, step: int, reached: int) -> None:
        self._ledger = ChangeLedger(run)
        self.history = self._ledger.read()
        self._reached = max(step, reached, self.history.reached)
        self._begins = self._reached > max(step, self.history.reached)
        self._seen: Stamp = None
        self._complained = False
        if self._begins:  # the line is written now, or with the first step
            self._append(self._begun)

    def at(self, step: int) -> Mapping[str, Any]:
        """The changed values with which `step` is made, which is about to begin. What waits is applied first. Where the ledger
        cannot be written (a full disk), it goes on waiting."""
        stamp, first = self._ledger.stamp, max(step, self._reached + 2)
        if (stamp != self._seen or self._begins) and self._append(lambda known: [*self._begun(known), *known.apply(first)]):
            self._seen, self._begins = stamp, False
        return self.history.in_force(step)

    def _begun(self, history: ChangeHistory) -> list[Line]:
        return [ReachedStep(step=self._reached)] if self._begins and self._reached > history.reached else []

    def _append(self, decide: Callable[[ChangeHistory], Sequence[Line]]) -> bool:
        """Whether it was done."""
        try:
            self.history = self._ledger.append(decide, wait=False)
        except BlockingIOError:
            return False
        except (OSError, DamagedError) as error:
            if not self._complained:
                _log.error("nothing of the run changes as long as this lasts: %s", error)
            self._complained = True
            return False
        self._complained = False
        return True


def described(change: Change) -> str:
    """A change as one line for a person."""
    what = ", ".join(f"{key} {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in change.values.items())
    return f"{what}, {'waits for the next step' if change.step is None else f'from step {change.step} on'}"
