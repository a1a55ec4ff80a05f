"""The rows of a run whose prompts arrive during the run, in the order of arrival, with the groups that each is for.

    stream.jsonl   {"claim":17,"line":3,"row":{...}}   a row a line, with the place it came from
    ended          there will be no further row

Row i is the prompt of the groups i k to (i + 1) k - 1, k being how often each row is used. So nothing but the place of a row
in this file binds it to its groups, and a row that is here has its groups whatever dies: `append` returns when it is on disk,
and only then do its numbers exist. In memory there are eight bytes a row; rows are read when they are credited.

What a crash left of the newest append is cut off when the file is opened: the rows were not there yet, and are claimed again.
That there is an end, too, is for good: the last batch may be a smaller one, and a group behind it would be too old.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

from async_rlhf.buffers.errors import DamagedError, JournalError
from async_rlhf.buffers.files import DISK, Appending, Disk, File, write_whole
from async_rlhf.buffers.spool.deposit import MAX_ROW_BYTES

_PIECE = 1 << 20
MAX_APPEND_BYTES = 8 * MAX_ROW_BYTES
"""The largest append: a crash may tear as much."""
_ROW = b',"row":'

Place = tuple[int, int]
"""A claim and a line of it, both counted from 1: where a row came from."""


class PromptStream:
    """Owns the files. Raises JournalError where they cannot be read, DamagedError where they are not as they were written."""

    def __init__(self, directory: Path, repeat: int = 1, files: Disk = DISK) -> None:
        """repeat: k, how often each row is used."""
        self._path, self._marker = directory / "stream.jsonl", directory / "ended"
        self.repeat, self._files = repeat, files
        self._starts = array("Q")
        self._file = Appending(self._path, files)
        self._reader: File | None = None
        self.tail: Place = (0, 0)
        """The place of the newest row."""
        try:
            files.make(directory)
            names = files.names(directory)
            self.ended = self._marker.name in names
            if self._path.name in names:
                self._open()
            files.sync_path(directory)  # a process that was killed may have left that undone
        except OSError as error:
            raise JournalError(f"{self._path} cannot be read: {error}; mend the disk, then resume the run") from error

    @property
    def num_rows(self) -> int:
        return len(self._starts)

    @property
    def num_numbers(self) -> int:
        """How many group numbers have a row."""
        return self.num_rows * self.repeat

    def append(self, rows: Sequence[tuple[Place, str]]) -> None:
        """Bind further rows, JSON objects with their places; on disk when it returns. Raises OSError, and binds none then."""
        lines = [b'{"claim":%d,"line":%d%b%b}\n' % (*place, _ROW, row.encode()) for place, row in rows]
        data = b"".join(lines)
        assert len(data) <= MAX_APPEND_BYTES
        start = self._file.end
        self._file.append(data)
        for line in lines:
            self._starts.append(start)
            start += len(line)
        if rows:
            self.tail = rows[-1][0]

    def row(self, number: int) -> str:
        """The row of a group number, a JSON object; of numbers that exist."""
        return self.row_at(number // self.repeat)

    def row_at(self, index: int) -> str:
        """The row of this index, a JSON object."""
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < self.num_rows else self._file.end
        try:
            if self._reader is None:
                self._reader = self._files.reader(self._path)
            line = self._files.read_at(self._reader, end - start, start)
        except OSError as error:
            raise JournalError(f"{self._path} cannot be read: {error}; mend the disk, then resume the run") from error
        if _place(line) is None:
            raise DamagedError(f"{self._path} is damaged: bytes {start} to {end} are no row. Restore it from a copy")
        return line[line.index(_ROW) + len(_ROW) : -2].decode()

    def end(self) -> None:
        """End the stream. Raises OSError; nothing changes then."""
        write_whole(self._marker, files=self._files)
        self.ended = True

    def close(self) -> None:
        self._file.close()
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> None:
        """Read the places of all rows, and cut off an unfinished append."""
        size, end = self._files.size(self._path), 0
        reader = self._reader = self._files.reader(self._path)
        for offset in range(0, size, _PIECE):
            piece, at = self._files.read_at(reader, min(_PIECE, size - offset), offset), -1
            while (at := piece.find(b"\n", at + 1)) >= 0:
                self._starts.append(end)
                end = offset + at + 1
        self._file.cut(self._whole(reader, end))
        self._files.sync_path(self._path)  # and this

    def _whole(self, reader: File, end: int) -> int:
        """Leave out the first line that is no row, among those that the newest append may have written, and all behind it.
        end: of all lines; returns that of the last row."""
        first = len(self._starts)
        while first and self._starts[first - 1] >= end - MAX_APPEND_BYTES:
            first -= 1
        begin = self._starts[first] if first < len(self._starts) else end
        data = self._files.read_at(reader, end - begin, begin)
        ends = [start - begin for start in self._starts[first + 1 :]] + [end - begin]
        at = 0
        for index, next_at in enumerate(ends if data else (), first):
            if (place := _place(data[at:next_at])) is None:
                del self._starts[index:]
                return begin + at
            self.tail, at = place, next_at
        return end


def _place(line: bytes) -> Place | None:
    """The place that a line names; None for what is no line of a stream."""
    try:
        fields = json.loads(line)
        place = fields["claim"], fields["line"]
    except (ValueError, TypeError, KeyError):
        return None
    whole = line.endswith(b"}\n") and isinstance(fields.get("row"), dict) and all(type(each) is int for each in place)
    return place if whole else None
