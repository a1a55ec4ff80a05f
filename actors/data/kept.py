"""Rows that are kept in a file, a row a line, and read from there each time they are asked for.

A process that has them holds the place of one line in 16, and none of the rows: so it needs hardly more memory for a million
than for a few. Any number of processes read the file; it must not change meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from async_rlhf.actors.prompts import Row, RowSequence, from_json
from async_rlhf.buffers.errors import DamagedError

_STRIDE = 16
_CHUNK = 1 << 20
_BATCH = 256
_BEGIN = '{"prompt": '


class KeptRows(RowSequence):
    """The rows that were written to a file as `written` gives them. count: how many there were; None: that is not known.

    Raises DamagedError, here and where a row is read, for a file that is not as it was written.
    """

    def __init__(self, file: Path, count: int | None = None) -> None:
        self._file, self._count, at, places = file, 0, 0, [np.zeros(1, np.int64)]
        chunk = b"\n"
        for chunk in chunks(file):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            places.append(ends[_STRIDE - 1 - self._count % _STRIDE :: _STRIDE] + (at + 1))
            self._count, at = self._count + len(ends), at + len(chunk)
        self._places = np.append(np.concatenate(places), at)  # where every 16th line begins, and where the last one ends
        if not chunk.endswith(b"\n") or count not in (None, self._count):
            raise _damaged(file, f"it has {self._count} whole rows{'' if count is None else f', written were {count}'}")

    def __len__(self) -> int:
        return self._count

    def at(self, number: int) -> Row:
        block, place = divmod(number, _STRIDE)
        begin, end = map(int, self._places[block : block + 2])
        try:
            with self._file.open("rb", buffering=0) as file:
                file.seek(begin)
                line = file.read(end - begin).split(b"\n")[place]
        except (OSError, IndexError) as error:
            raise _damaged(self._file, error) from error
        return self._row(number, line)

    def __iter__(self) -> Iterator[Row]:
        try:
            with self._file.open("rb") as file:
                for number, line in enumerate(file):
                    yield self._row(number, line)
        except OSError as error:
            raise _damaged(self._file, error) from error

    def _row(self, number: int, line: bytes) -> Row:
        try:
            return from_json(line)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _damaged(self._file, f"row {number} cannot be read: {error}") from error


def written(rows: Iterable[Row]) -> Iterator[bytes]:
    """A file of these rows, in parts. The encoder of `json` costs more than a short row, so it gets many at once."""
    coming = iter(rows)
    while batch := [{"prompt": row.prompt, **row.columns} for row in islice(coming, _BATCH)]:
        # A quote within a text has a backslash before it, so this is between rows, or between objects of a list in a column.
        lines = json.dumps(batch)[1:-1].replace(f"}}, {_BEGIN}", f"}}\n{_BEGIN}")
        if lines.count("\n") != len(batch) - 1:
            lines = "\n".join(map(json.dumps, batch))
        yield lines.encode() + b"\n"


def chunks(file: Path) -> Iterator[bytes]:
    """The bytes of a file, in parts. Raises DamagedError."""
    try:
        with file.open("rb", buffering=0) as opened:
            while chunk := opened.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, what: object) -> DamagedError:
    return DamagedError(f"{file} is damaged: {what}. Restore it from a copy")
