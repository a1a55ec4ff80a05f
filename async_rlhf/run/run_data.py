"""The rows of a run: written once into its directory, so that every process and every resumed run reads the same.

data/training.jsonl, data/held_out.jsonl   a row a line, as `load_rows` gave them, without those that were dropped
data/images/                               the images that rows, and what was said in episodes, name by digest
                                           (`buffers/images/store`)
data/summary.json                          written last; how many rows there are, and how many were dropped
data/spool/                                where rows come while the run goes on: stream.jsonl has them in their order,
                                           rejected/ what is of no use to the run (`buffers/spool`)
data/order.jsonl                           with a curriculum: the row of each group, and how groups went (`curriculum`)

What the rows came from (a file that is edited, objects of a Python program, a task that draws from sets) is not needed any
more, nor are the packages to read it. An actor on another machine is given a copy; where there is none, it loads the rows
itself, those too that a run leaves out (`checks.preflight`), and the hub lets it in only when they are the same.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.kept import KeptRows, chunks, written
from async_rlhf.actors.data.rows import epoch_of, load_rows
from async_rlhf.actors.prompts import Row, prompt_number
from async_rlhf.buffers.curriculum import Order
from async_rlhf.buffers.files import write_whole
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore, scratch
from async_rlhf.buffers.spool.stream import PromptStream
from async_rlhf.run.run_files import read_object

Rows = tuple[Sequence[Row], Sequence[Row]]
"""Training rows, each once, and held-out rows."""

_log = logging.getLogger(__name__)
_FILES = ("training.jsonl", "held_out.jsonl")
_SUMMARY = "summary.json"


class RunData:
    """The data of the run in this directory, by its configuration."""

    def __init__(self, run: Path, config: DataConfig) -> None:
        self._directory, self._config, self._kept_images = run / "data", config, kept_images(run)

    @property
    def is_kept(self) -> bool:
        """Whether the rows lie in the run directory."""
        return (self._directory / _SUMMARY).is_file()

    @cached_property
    def rows(self) -> Rows:
        """Where they are kept, read when they are asked for: a process has no more memory for many than for few.

        Raises DamagedError for files that are not as they were written, ConfigError as `load_rows` does.
        """
        if not self.is_kept:
            return load_rows(self._config)
        if dropped := self._num_dropped:
            _log.warning("%d prompts are left out: too long (data.on_overlong = 'drop'), or held-out ones", dropped)
        counts = self._summary
        training, held_out = (KeptRows(self._directory / name, counts.get(name.removesuffix(".jsonl"))) for name in _FILES)
        return training, held_out

    @property
    def images(self) -> ImageStore:
        """The images of its rows: where none are kept, those that this process has loaded."""
        return self._kept_images if self._keeps_images else scratch()

    def image_processor(self, model: str) -> ImageProcessor | None:
        """What prepares them for a model directory; None where there are none. Raises ConfigError."""
        return ImageProcessor(Path(model), self.images) if self.has_images else None

    @property
    def has_images(self) -> bool:
        """Whether its rows, or those of an evaluation, have images, or some may come. Raises as `rows`."""
        if self._config.images:
            return True
        if self._keeps_images:
            return any(True for _ in self.images)
        return any(row.images for part in self.rows for row in part)

    @property
    def _keeps_images(self) -> bool:
        return self.is_kept or (self._directory / "images").is_dir()

    def is_from(self, given: Rows) -> bool:
        """Whether they are these, without those that were left out. Raises as `rows`."""
        found = [iter(part) for part in given]
        is_part = all(row in theirs for ours, theirs in zip(self.rows, found, strict=True) for row in ours)
        return is_part and sum(map(len, given)) - sum(map(len, self.rows)) == self._num_dropped

    def epoch(self) -> Sequence[Row]:
        """The training rows of one epoch, which a group's number points into."""
        return epoch_of(self._config, self.rows[0])

    @cached_property
    def num_prompts(self) -> int:
        """Number of prompts of one epoch; of a spool, of those that have come so far. Raises as `rows`, JournalError."""
        if self._config.spool is None:
            return len(self.epoch())
        with closing(PromptStream(self._directory / "spool")) as stream:
            return stream.num_rows

    def open_order(self) -> Order | None:
        """The order of a run with a curriculum; one process at a time has and closes it. Raises JournalError, DamagedError."""
        curriculum = self._config.curriculum
        return Order(self._directory, curriculum, self._config.epochs) if curriculum.is_on else None

    def prompt_of(self, seed: int, order: Order | None, group: int) -> int:
        """Index of the row that group number `group` has: of an epoch, or in the order in which rows came into the spool.

        order: of `open_order`.
        """
        place = group if order is None else order.place(group)
        if self._config.spool is not None:
            return place // self._config.repeat if order is None else place
        return prompt_number(seed, place, self.num_prompts)

    @property
    def digest(self) -> str:
        """Digest of the contents, independent of where the rows are or come from."""
        found = xxhash.xxh3_128()
        is_kept = self.is_kept
        for name, rows in zip(_FILES, ((), ()) if is_kept else self.rows, strict=True):
            found.update(b"\0")
            for part in chunks(self._directory / name) if is_kept else written(rows):
                found.update(part)
        return found.hexdigest()

    def keep(self, rows: Rows, dropped: int) -> None:
        """Write them, and their images, which this process has loaded. dropped: how many are left out. Raises OSError."""
        self._directory.mkdir(exist_ok=True)
        keep_images(chain(*rows), self._kept_images)
        for name, each in zip(_FILES, rows, strict=True):
            write_whole(self._directory / name, *written(each))
        counts = {"training": len(rows[0]), "held_out": len(rows[1]), "dropped": dropped}
        write_whole(self._directory / _SUMMARY, json.dumps(counts) + "\n")

    @property
    def _num_dropped(self) -> int:
        return int(self._summary.get("dropped", 0))

    @property
    def _summary(self) -> dict[str, Any]:
        return read_object(self._directory / _SUMMARY)


def kept_images(run: Path) -> ImageStore:
    """Those of the run in this directory."""
    return ImageStore(run / "data" / "images")


def keep_images(rows: Iterable[Row], images: ImageStore) -> None:
    """Keep the images of rows that this process has loaded. Raises OSError."""
    if missing := {digest for row in rows for digest in row.images}.difference(images):
        images.take(missing, scratch())
        os.sync()  # one by one they would take milliseconds each
