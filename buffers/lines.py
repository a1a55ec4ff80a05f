"""Files of one JSON object a line that one process appends to: a line is in the file whole, or not at all.

What a crash, a failing disk or a full one left behind the last whole line is cut off before the next is written. Files are
read in pieces, so that a long run's cost no memory. A file with a limit begins anew when it is reached, and the lines before it
lie beside it (`NAME.1`) until it is reached again: the newest lines of so many bytes are always there, and no more than twice
as many and a line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from async_rlhf.buffers.files import DISK, Appending
from async_rlhf.buffers.parsing import json_value

_log = logging.getLogger(__name__)
_PIECE = 1 << 16
# What is longer is no line of ours: a damaged file may have no end of line for a long way.
_LONGEST = 64 << 20

Line = dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """`last`: the line that a file ends with now. `damaged`: bytes that were cut off and were no whole lines."""

    last: Line | None
    damaged: int


class LineFile:
    """Owns the file, which is made with the first line. Each line is with the operating system when `write` returns.

    max_bytes: after which the file begins anew; None: never.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = Appending(path)

    def cut(self, keep: Callable[[Line], bool] = lambda line: True) -> Cut:
        """End the file with its last whole line that `keep` keeps. To be called before the first `write`."""
        cut, before = self._cut(keep), earlier(self._path)
        if cut.last is None and before.exists():  # all that is kept lies in the lines before
            DISK.replace(before, self._path)
            rest = self._cut(keep)
            return Cut(rest.last, cut.damaged + rest.damaged)
        return cut

    def _cut(self, keep: Callable[[Line], bool]) -> Cut:
        if not self._path.exists():
            return Cut(None, 0)
        behind, whole, last, damaged = DISK.size(self._path), 0, None, 0
        for start, end, line in _backwards(self._path):
            damaged += behind - end  # the beginning of a line
            behind = end
            if line is not None and keep(line):
                whole, last = end, line
                break
            damaged += 0 if line is not None else end - start
            behind = start
        else:
            damaged += behind
        self._file.cut(whole)
        return Cut(last, damaged)

    def write(self, line: str) -> None:
        """Append a line, given without its end. Raises OSError; nothing of it is then left when the next one is written."""
        if self._max_bytes is not None and self._file.end >= self._max_bytes:
            self._begin_anew()
        if not self._file.end:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file.append(f"{line}\n".encode(), durable=False)

    def _begin_anew(self) -> None:
        self.sync()  # a later sync is of this file alone
        self.close()
        DISK.replace(self._path, earlier(self._path))
        self._file = Appending(self._path)

    def sync(self) -> None:
        """Make all written lines durable; may be called by another thread. Raises OSError."""
        with suppress(FileNotFoundError):  # it may be about to begin anew
            DISK.sync_path(self._path)
            DISK.sync_path(self._path.parent)

    def close(self) -> None:
        self._file.close()


def earlier(path: Path) -> Path:
    """The file with the lines from before the newest restart of `path`."""
    return path.with_name(f"{path.name}.1")


def read_lines(path: Path) -> Iterator[Line]:
    """The whole lines of a file, first to last, those before it began anew included; none where there is no file, and the last
    may be being written.

    What is no line (a damaged page) is passed over and logged with its place.
    """
    for part in (earlier(path), path):
        if part.exists():
            yield from _read(part)


def _read(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        start = 0
        for raw in file:
            if (line := _parsed(raw)) is not None:
                yield line
            elif raw.endswith(b"\n"):
                _log.warning("%s is damaged: bytes %d to %d are not a line", path, start, start + len(raw))
            start += len(raw)


def read_lines_backwards(path: Path) -> Iterator[Line]:
    """The whole lines of a file, last to first; none where there is no file. What is no line is passed over."""
    if path.exists():
        yield from (line for *_, line in _backwards(path) if line is not None)


def _backwards(path: Path) -> Iterator[tuple[int, int, Line | None]]:
    """(begin, end, content) of each line, last to first; the content is None for a damaged line."""
    with path.open("rb") as file:
        end = None
        for begin in _line_ends(file):
            if end is not None:
                yield begin, end, _line_at(file, begin, end)
            end = begin
        if end:
            yield 0, end, _line_at(file, 0, end)


def _line_ends(file: BinaryIO) -> Iterator[int]:
    """Offsets right behind each end of line, last to first."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        length = min(_PIECE, position)
        position -= length
        piece = os.pread(file.fileno(), length, position)
        at = piece.rfind(b"\n")
        while at >= 0:
            yield position + at + 1
            at = piece.rfind(b"\n", 0, at)


def _line_at(file: BinaryIO, start: int, end: int) -> Line | None:
    if end - start > _LONGEST or os.pread(file.fileno(), 1, start) != b"{":
        return None
    return _parsed(os.pread(file.fileno(), end - start, start))


def _parsed(raw: bytes) -> Line | None:
    if not raw.startswith(b"{") or not raw.endswith(b"\n"):
        return None
    try:
        line: Line = json_value(raw)
    except ValueError:
        return None
    return line
