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
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import xxhash

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.lines import read_lines_backwards
from async_rlhf.buffers.parsing import json_value

MAX_SMALL_BYTES = 4 << 20
"""A configuration, a status: far more than they ever have."""
MAX_LOG_BYTES = 8 << 30
"""A file with a line a step, where all of it is read into memory."""
_GROWING_BYTES = 256 << 30
"""The same, where only its end or what was added is read: a hundred million steps."""
_MAX_LINE_BYTES = 16 << 20
_REMEMBERED = 4096
_HIGHEST = 1e150  # no mean of scores: a number of a damaged file
_SKIPPED_BYTES = 4 << 20
_WHOLE_BYTES, _PLACES, _WINDOW = 24 << 20, 1500, 16 << 10
"""Of steps that are read from their beginning; of longer files so many places are read, of so many bytes each."""


@dataclass
class Lines:
    """Whole lines that are JSON objects, and how many others there were."""

    records: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0
    first_unreadable: int = 0
    """Its number, from 1."""


def printable(text: str) -> str:
    """What may be shown on a terminal: line ends stay, all else that does not print is written out as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def open_regular(path: Path, max_bytes: int) -> IO[bytes]:
    """Open for reading. Raises FileNotFoundError, and DamagedError for what is no regular file or larger; never waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
        os.close(descriptor)
        what = (
            f"has {found.st_size} bytes, at most {max_bytes} are read" if stat.S_ISREG(found.st_mode) else "is no regular file"
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


def read_lines(path: Path, max_bytes: int = MAX_LOG_BYTES) -> Lines:
    """A JSONL file; its last line may be being written and is left out then. Raises DamagedError for what is no such file."""
    with suppress(FileNotFoundError), open_regular(path, max_bytes) as file:
        return _lines(iter(lambda: file.readline(_MAX_LINE_BYTES), b""))
    return Lines()


def read_last_lines(path: Path, window: int = 1 << 20) -> Lines:
    """As `read_lines`, of the last `window` bytes only: takes no longer for a longer run."""
    with suppress(FileNotFoundError), open_regular(path, _GROWING_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        if size > window:
            file.seek(size - window)
            file.readline(window)
        return _lines(io.BytesIO(file.read(window)))
    return Lines()


def is_long(path: Path) -> bool:
    """Whether only a part of its steps is read (`read_steps`)."""
    return path.is_file() and path.stat().st_size > _WHOLE_BYTES


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """The records of steps in a JSONL file; of a long one those at even distances and the newest, in a second or two.

    Steps rise, but for those of a learner that started again. Raises DamagedError for what is no such file.
    """
    if not is_long(path):
        yield from filter(is_step, Tail(path).rest())
        return
    newest = 0
    with suppress(FileNotFoundError), open_regular(path, _GROWING_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        for place in (*range(_PLACES), None):
            offset = max(0, size - (1 << 20)) if place is None else size * place // _PLACES
            file.seek(offset)
            if offset:
                file.readline(_WINDOW)
            for record in filter(is_step, _lines(io.BytesIO(file.read(_WINDOW if place is not None else 1 << 20))).records):
                if record["step"] > newest:  # windows may overlap
                    newest = record["step"]
                    yield record


class Tail:
    """The whole lines that were added to a JSONL file since the last `read`.

    A learner that starts again cuts the file, and may have written beyond the old end before it is looked at: reading goes on
    behind the last line that still stands where it was read. unreadable: lines that were left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)  # begin, end, digest of the newest lines
        self.unreadable = 0

    def skip(self) -> None:
        """Leave out the lines that are there now, but for one that is being written.

        Those at the end are remembered as if they had been read. A file of which more than those is cut afterwards is read on
        from where they begin, so a line may be lost. Raises DamagedError when the file is no regular one.
        """
        with suppress(FileNotFoundError), open_regular(self._path, _GROWING_BYTES) as file:
            begin = max(0, os.fstat(file.fileno()).st_size - _SKIPPED_BYTES)
            file.seek(begin)
            begin += len(file.readline(_MAX_LINE_BYTES)) if begin else 0
            self._read.append((begin, begin, xxhash.xxh3_64_intdigest(b"")))
        for _ in self.rest():
            pass

    def read(self) -> list[dict[str, Any]]:
        """Raises DamagedError when the file is no regular one."""
        try:
            file = open_regular(self._path, _GROWING_BYTES)
        except FileNotFoundError:
            return []
        with file:
            while self._read and not self._stands(file, *self._read[-1]):
                self._read.pop()
            offset = self._read[-1][1] if self._read else 0
            file.seek(offset)
            # No more than there is: a buffer of the most that there may be, cut down to a line, leaves holes in the heap.
            data = file.read(min(_MAX_LINE_BYTES, max(0, os.fstat(file.fileno()).st_size - offset)))
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == _MAX_LINE_BYTES:
            whole = data  # no line is so long
        lines = io.BytesIO(whole).readlines()
        for line in lines:
            self._read.append((offset, offset + len(line), xxhash.xxh3_64_intdigest(line)))
            offset += len(line)
        found = _lines(lines)
        self.unreadable += found.unreadable
        return found.records

    def rest(self) -> Iterator[dict[str, Any]]:
        """All that is there: a `read` is of so many bytes at most."""
        return chain.from_iterable(iter(self.read, []))

    @staticmethod
    def _stands(file: IO[bytes], begin: int, end: int, digest: int) -> bool:
        file.seek(begin)
        return xxhash.xxh3_64_intdigest(file.read(end - begin)) == digest


def is_step(record: dict[str, Any]) -> bool:
    """The learner writes whole records; whatever else stands in its file after a crash is left out."""
    return type(record.get("step")) is int


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
    return {name: value for name, value in found.items() if isinstance(value, int | float) and abs(value) < _HIGHEST}


def line_of_step(path: Path, step: int | None = None) -> dict[str, Any] | None:
    """The line of a step, of the newest for None, read from the end of a file of any length. Raises DamagedError when it is no
    regular one."""
    with suppress(FileNotFoundError):
        open_regular(path, _GROWING_BYTES).close()
        return next((line for line in filter(is_step, read_lines_backwards(path)) if step in (None, line["step"])), None)
    return None


def highest_step(records: Iterable[dict[str, Any]]) -> int:
    """0 where none is of a step."""
    return max((record["step"] for record in records if is_step(record)), default=0)


def _lines(lines: Iterable[bytes]) -> Lines:
    found = Lines()
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
            break
        try:
            found.records.append(_object(line.decode(errors="replace")))
        except ValueError:
            found.first_unreadable = found.first_unreadable or number
            found.unreadable += 1
    return found


def _object(text: str) -> dict[str, Any]:
    if not isinstance(found := json_value(text), dict):
        raise ValueError("it is no JSON object")
    return found
