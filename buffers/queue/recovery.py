"""Reading a journal: the queue's state when a hub begins or an operator takes a group back, and the trained batches.
Beside it lies `quarantine.jsonl`, one JSON object a line, for a person to read (`QuarantineFile`):

    {"group": 17, "prompt": 5, "attempts": 3, "reasons": ["attempt 0: actor-1 was silent for 15 s", ...]}

prompt: the row of the data set. reasons: of the newest attempts. The journal decides what is quarantined; the file is written
before the journal has it, as a whole, under another name first. So after a crash it has a line for every quarantined group,
perhaps one too many, which is taken out when the hub begins.

The batches (`read_batches`, `committed_step`) are only read: no lock is taken, nothing is cut off, the run may be alive. They
are whole where the journal keeps its segments (`queue.keep_rollouts = true`), else what is not committed yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.files import DISK, Disk, write_whole
from async_rlhf.buffers.protocol import packing
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.segment import PutRecord, records, records_of
from async_rlhf.buffers.record import Group


def recovered(config: QueueConfig, bound: Bound, journal: Journal) -> Admission:
    """The state in which the hub died that wrote this journal."""
    admission = Admission(bound, max_attempts=config.max_attempts, lease_s=config.lease_s)
    replay = journal.replay
    admission.restore(replay.state, replay.entries)
    for step in sorted(replay.batches):
        admission.assign(step, replay.batches[step])
    return admission


def take_back(
    directory: Path,
    config: QueueConfig,
    bound: Bound,
    number: int,
    reason: str,
    *,
    steps_done: int,
    prompt_of: Callable[[int], int] | None = None,
) -> None:
    """Quarantine a group of a run whose processes have ended. steps_done: of the checkpoint that it will go on from.

    Raises RefusedError as `Admission.quarantine`, JournalError when the journal is in use or cannot be read or written.
    """
    journal = Journal(directory / "queue", segment_bytes=config.segment_bytes, keep=config.keep_rollouts)
    try:
        admission, state = recovered(config, bound, journal), journal.replay.state
        admission.quarantine(number, reason, steps_done)
        with journal.disk():
            QuarantineFile(directory / "quarantine.jsonl", prompt_of, (*state.quarantined, *state.removed)).write(
                admission.fleet.failures.quarantined
            )
        journal.state(admission.remember(), [number])
        journal.sync()
    finally:
        journal.close()


class QuarantineFile:
    """Owns the file. Raises OSError when it cannot be written."""

    def __init__(
        self, path: Path, prompt_of: Callable[[int], int] | None, quarantined: Iterable[int], files: Disk = DISK
    ) -> None:
        self._path, self._prompt_of, self._files = path, prompt_of, files
        kept = self._read()
        self._records = {
            number: kept.get(number) or self._record(number, None, ["the file with the reason was lost"])
            for number in sorted(quarantined)
        }
        if kept.keys() != self._records.keys():
            self._write()

    def write(self, quarantined: Mapping[int, tuple[int, tuple[str, ...]]]) -> None:
        """Add these groups, number -> attempts and reasons; durable when it returns."""
        missing = [number for number in quarantined if number not in self._records]
        for number in missing:
            self._records[number] = self._record(number, *quarantined[number])
        try:
            if missing:
                self._write()
        except OSError:
            for number in missing:
                del self._records[number]
            raise

    def _record(self, number: int, attempts: int | None, reasons: Iterable[str]) -> dict[str, Any]:
        prompt = None if self._prompt_of is None else self._prompt_of(number)
        return {"group": number, "prompt": prompt, "attempts": attempts, "reasons": list(reasons)}

    def _read(self) -> dict[int, dict[str, Any]]:
        if self._path.name not in self._files.names(self._path.parent):
            return {}
        try:
            records = [json.loads(line) for line in self._files.read(self._path).decode().splitlines()]
            return {record["group"]: record for record in records}
        except (ValueError, KeyError, TypeError):
            return {}  # edited by hand; the journal has the numbers

    def _write(self) -> None:
        write_whole(self._path, *(json.dumps(record) + "\n" for record in self._records.values()), files=self._files)


@dataclass(frozen=True)
class ArchivedBatch:
    """The groups of learner step `step` (counted from 0), in the order in which they were trained."""

    step: int
    groups: tuple[Group, ...]


def read_batches(queue_dir: Path) -> Iterator[ArchivedBatch]:
    """Every batch whose groups are in the journal, by ascending step.

    Raises JournalError for a damaged segment, and for a directory that holds no journal; WireError for groups of a protocol
    that is not read any more.
    """
    waiting: dict[int, bytes] = {}
    for record in records(queue_dir):
        if isinstance(record, PutRecord):
            waiting[record.number] = record.payload
        elif all(number in waiting for number in record.numbers):
            payloads = [waiting.pop(number) for number in sorted(record.numbers)]
            yield ArchivedBatch(record.step, tuple(packing.decode_put(packing.from_bytes(payload)) for payload in payloads))


def committed_step(queue_dir: Path) -> int:
    """Learner steps whose groups the queue has given up; 0 without a journal. Reads the newest segment with a state."""
    for path in sorted(queue_dir.glob("[0-9]*.log"), reverse=True):
        states = [record for record, *_ in records_of(path.read_bytes()) if isinstance(record, QueueSnapshot)]
        if states:
            return states[-1].committed_step
    return 0
