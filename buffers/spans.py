"""What a process did and when, one JSON object a line, for a trace of the run afterwards. Few and small: idle stretches,
adopted weights. Losing a line loses a mark on a picture and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rlhf.buffers.lines import LineFile, read_lines

_log = logging.getLogger(__name__)


class SpanFile:
    """Owns the file, appended to by one process. `lost_lines`: those that could not be written, on a full disk for example."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._file.cut()
        self.lost_lines = 0

    def write(self, name: str, began: float, ended: float, **about: Any) -> None:
        """name: what it was. began, ended: seconds since the epoch."""
        span = {"name": name, "began": round(began, 6), "ended": round(ended, 6), **about}
        try:
            self._file.write(json.dumps(span))
        except OSError as error:
            if not self.lost_lines:
                _log.error("spans are lost from here on as long as this lasts: %s", error)
            self.lost_lines += 1

    def close(self) -> None:
        self._file.close()


def read_spans(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of one process; the last may be being written."""
    return read_lines(path)
