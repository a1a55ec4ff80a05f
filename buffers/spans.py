"""What a process did and when, one JSON object a line, for a trace of the run afterwards. Few and small: idle stretches,
adopted weights. Losing a line loses a mark on a picture and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class SpanFile:
    """Owns the file, appended to by one process; each line is flushed as it is written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a")

    def write(self, name: str, began: float, ended: float, **about: Any) -> None:
        """name: what it was. began, ended: seconds since the epoch."""
        span = {"name": name, "began": round(began, 6), "ended": round(ended, 6), **about}
        self._file.write(json.dumps(span) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_spans(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of one process; the last may be being written."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
