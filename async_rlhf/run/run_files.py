"""Reads the small files of a run directory, which may be damaged, foreign or still being written.

Every read is bounded: a regular file, so many bytes at most, checked types. What cannot be read is a DamagedError that names
the file, or counted where the rest is of use all the same. Writes nothing.
"""

from __future__ import annotations

import io
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeGuard

import xxhash

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.lines import earlier, read_lines_backwards
from async_rlhf.buffers.parsing import json_value

MAX_SMALL_BYTES = 4 << 20
"""A configuration, a status: far more than they ever have."""
MAX_LOG_BYTES = 8 << 30
"""A file with a line a step, where all of it is read into memory."""
_GROWING_BYTES = 256 << 30
"""The same, where only its end or what was added is read: a hundred million steps."""
_MAX_LINE_BYTES = 16 << 20
_REMEMBERED = 4096
_HIGHEST = 1e150  # beyond it is a number of a damaged file
_SKIPPED_BYTES = 4 << 20


Line = dict[str, Any]


def printable(text: str) -> str:
    """The text for a terminal: line ends stay, other unprintable characters become escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def stamp(path: Path) -> tuple[int, int] | None:
    """Another one after every change of a file; None without one."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


def open_regular(path: Path, max_bytes: int = _GROWING_BYTES) -> IO[bytes]:
    """Open for reading. Raises FileNotFoundError, and DamagedError for what is no regular file or larger; never waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    stats = os.fstat(descriptor)
    if not stat.S_ISREG(stats.st_mode) or stats.st_size > max_bytes:
        os.close(descriptor)
        what = (
            f"has {stats.st_size} bytes, at most {max_bytes} are read" if stat.S_ISREG(stats.st_mode) else "is no regular file"
        )
        raise DamagedError(f"{path} {what}")
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> str:
    """A whole small file. Raises FileNotFoundError and DamagedError."""
    with open_regular(path, max_bytes) as file:
        try:
            return file.read(max_bytes).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise DamagedError(f"{path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A small file with one JSON object; empty where there is no file. Raises DamagedError."""
    try:
        text = read_small(path)
    except FileNotFoundError:
        return {}
    try:
        return _object(text)
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}. Remove it, or restore it from a copy") from error


def read_lines(path: Path, *, all_good: bool = False) -> list[Line]:
    """The lines of a JSONL file, without an unfinished last line. all_good: no other is left out.

    Raises DamagedError for what is no such file.
    """
    tail = Tail(path, most=MAX_LOG_BYTES)
    found = list(tail.rest())
    if all_good and tail.unreadable:
        raise DamagedError(
            f"{path} is damaged: {tail.unreadable} lines are no JSON objects, the first is line {tail.first_unreadable}"
        )
    return found


class Tail:
    """The whole lines that were added to a JSONL file since the last `read`; any but JSON objects are left out.

    A learner that starts again cuts the file, and may have written beyond the old end before it is looked at: reading goes on
    behind the last line that still stands where it was read. Reading raises DamagedError when the file is no regular one, or
    has more than `most` bytes. last: of what is there at first so many bytes at the end are read; None: all.

    lines: the newest `keep` that were read. num_lines: all that were, unreadable: those of them that were left out, of which
    first_unreadable is the first, counted from 1.
    """

    def __init__(self, path: Path, last: int | None = None, keep: int = 0, most: int = _GROWING_BYTES) -> None:
        self.path, self._last, self._most = path, last, most
        self.lines: deque[Line] = deque(maxlen=keep)
        self._read: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)  # begin, end, digest of the newest lines
        self._begin, self._has_more = -1, False
        self.num_lines = self.unreadable = self.first_unreadable = 0

    def skip(self) -> None:
        """Leave out the lines that are there now, but for one that is being written.

        Those at the end are remembered as if they had been read: what a learner that starts again cuts and writes is read.
        """
        self._last = _SKIPPED_BYTES
        self.refresh()

    def refresh(self) -> None:
        """Read what was added, of which the newest lines are kept."""
        for _ in self.rest():
            pass

    def whole(self) -> Iterator[Line]:
        """All lines, whatever was read before; those from before the file began anew too."""
        return chain.from_iterable(Tail(part).rest() for part in (earlier(self.path), self.path))

    def rest(self) -> Iterator[Line]:
        """All that is there: a `read` is of so many bytes at most."""
        yield from self.read()
        while self._has_more:
            yield from self.read()

    def read(self) -> list[Line]:
        try:
            file = open_regular(self.path, self._most)
        except FileNotFoundError:
            self._begin, self._has_more = 0, False
            return []
        with file:
            size = os.fstat(file.fileno()).st_size
            while self._read and not self._stands(file, *self._read[-1]):
                self._read.pop()
            offset = self._read[-1][1] if self._read else self._beginning(file, size)
            file.seek(offset)
            # No more than there is: a buffer of the most that there may be, cut down to a line, leaves holes in the heap.
            data = file.read(min(_MAX_LINE_BYTES, max(0, size - offset)))
        self._has_more = len(data) == _MAX_LINE_BYTES
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and self._has_more:
            whole = data  # no line is so long
        lines = list[Line]()
        for line in io.BytesIO(whole):
            self._read.append((offset, offset + len(line), xxhash.xxh3_64_intdigest(line)))
            offset += len(line)
            self.num_lines += 1
            if (record := parsed(line)) is not None:
                lines.append(record)
            else:
                self.unreadable += 1
                self.first_unreadable = self.first_unreadable or self.num_lines
        self.lines.extend(lines)
        return lines

    def _beginning(self, file: IO[bytes], size: int) -> int:
        """Where the first line that is read begins; another place where the file has begun anew."""
        if not 0 <= self._begin <= size:
            self._begin = 0 if self._last is None else max(0, size - self._last)
            file.seek(self._begin)
            self._begin += len(file.readline(self._last or 0)) if self._begin else 0
        return self._begin

    @staticmethod
    def _stands(file: IO[bytes], begin: int, end: int, digest: int) -> bool:
        file.seek(begin)
        return xxhash.xxh3_64_intdigest(file.read(end - begin)) == digest


def is_step(record: dict[str, Any]) -> bool:
    """The learner writes whole records; whatever else stands in its file after a crash is left out."""
    return type(record.get("step")) is int


def is_number(value: object) -> TypeGuard[int | float]:
    """Finite, and no larger than a mean of scores or a measure may be; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HIGHEST


def figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """By name, of a line of `evaluations.jsonl`: `accuracy` where one reward decides what is solved, `reward`, where there are
    several rewards the mean of each as `rewards/NAME`, and where there are several sources that of each as `reward/SOURCE`."""
    means = evaluation.get("rewards")
    several = means if isinstance(means, Mapping) and len(means) > 1 else {}
    accuracy = None if several and not evaluation.get("solved_by") else evaluation.get("accuracy")
    found = {"accuracy": accuracy, "reward": evaluation.get("mean_reward")}
    found |= {f"rewards/{name}": mean for name, mean in several.items()}
    apart = evaluation.get("by_source")
    if isinstance(apart, Mapping) and len(apart) > 1:
        found |= {f"reward/{source}": own.get("mean_reward") for source, own in apart.items() if isinstance(own, Mapping)}
    return {name: value for name, value in found.items() if is_number(value)}


def line_of_step(path: Path, step: int | None = None) -> dict[str, Any] | None:
    """The line of a step, of the newest for None, read from the end of a file of any length. Raises DamagedError when it is no
    regular one."""
    with suppress(FileNotFoundError):
        open_regular(path).close()
        return next((line for line in filter(is_step, read_lines_backwards(path)) if step in (None, line["step"])), None)
    return None


def highest_step(records: Iterable[dict[str, Any]]) -> int:
    """0 where none is of a step."""
    return max((record["step"] for record in records if is_step(record)), default=0)


def parsed(line: bytes) -> Line | None:
    """None where it is no JSON object."""
    try:
        return _object(line.decode(errors="replace"))
    except ValueError:
        return None


def _object(text: str) -> dict[str, Any]:
    if not isinstance(found := json_value(text), dict):
        raise ValueError("it is no JSON object")
    return found
