"""The numbers of what lies on disk: this code reads up to its own, and refuses what a newer one has written.

    what            number                                     lies in
    run directory   RUN: also of the small files in it         manifest.json
    journal         JOURNAL                                    the STATE record that every segment begins with
    group in it     `protocol/packing.py`, _OLDEST_PUT         its first frame
    weight set      WEIGHTS                                    the head of its file
    checkpoint      `learner/checkpoint/store.py`, SCHEMA      state.json
    queue of runs   QUEUE                                      state.json of each of its runs

What has no number is of format 1. A number is raised with a change after which older code would misread what is written, and
RUN with each of those above QUEUE: so a run directory is refused as a whole, by its manifest, before anything in it is touched.
`oldest` is raised with a change after which this code would misread what was written. A sample of each format is kept under
`tests/formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import FormatError


@dataclass(frozen=True)
class Format:
    """newest: the number of what this code writes. oldest: of what it reads."""

    what: str
    newest: int
    oldest: int = 1

    def check(self, found: object, path: Path | None = None) -> None:
        """Raises FormatError for a number that this code does not read."""
        if type(found) is int and self.oldest <= found <= self.newest:
            return
        older = type(found) is int and found < self.oldest
        reads = f"{self.oldest} to {self.newest}" if self.oldest < self.newest else f"{self.newest}"
        raise FormatError(
            f"{'' if path is None else f'{path}: '}{self.what} of format {found!r}, this version of async-rlhf reads {reads}. "
            f"Nothing was changed; use {'an older' if older else 'a newer'} version, or another directory"
        )


RUN = Format("a run directory", 3)
JOURNAL = Format("a journal", 3)
WEIGHTS = Format("a weight set", 1)
QUEUE = Format("an entry of a queue of runs", 1)
