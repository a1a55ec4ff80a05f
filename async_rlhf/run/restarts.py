"""How often each role of a run was started again, over all starts of the run: `restarts.json`, role to count.

Written by the supervisor, read by `status`, the page and Prometheus. For people only: where it cannot be written or read, the
run goes on and the counts are those that are known.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import write_whole
from async_rlhf.run.run_files import read_object


class Restarts:
    """Goes on from what an earlier start of the run has counted."""

    def __init__(self, path: Path) -> None:
        self._path, self._counts = path, Counter[str]()
        with suppress(DamagedError):
            self._counts.update(read_restarts(path))

    def count(self, role: str) -> None:
        """One of its processes was started again."""
        self._counts[role] += 1
        with suppress(OSError):  # a full disk: the next one that can be written has them all
            write_whole(self._path, json.dumps(self._counts) + "\n")


def read_restarts(path: Path) -> dict[str, int]:
    """By role; nothing where nothing was started again. Raises DamagedError."""
    found = read_object(path)
    if not all(type(count) is int and count >= 0 for count in found.values()):
        raise DamagedError(f"{path} is damaged: it holds other things than counts. Remove it")
    return found
