"""What a journal gives back: the queue's state when a hub begins or an operator takes a group back, and the trained batches.

The batches (`read_batches`, `committed_step`) are only read: no lock is taken, nothing is cut off, the run may be alive. They
are whole where the journal keeps its segments (`queue.keep_rollouts = true`), else what is not committed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.protocol import packing
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.quarantine import Quarantine
from async_rlhf.buffers.queue.segment import Put, parse, records
from async_rlhf.buffers.record import Group


def recovered(config: QueueConfig, bound: Bound, journal: Journal) -> Admission:
    """The state in which the hub died that wrote this journal."""
    admission = Admission(bound, max_attempts=config.max_attempts, lease_s=config.lease_s, max_bytes=config.max_bytes)
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
            Quarantine(directory / "quarantine.jsonl", prompt_of, (*state.quarantined, *state.removed)).write(
                admission.fleet.failures.quarantined
            )
        journal.state(admission.remember(), [number])
        journal.sync()
    finally:
        journal.close()


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
        if isinstance(record, Put):
            waiting[record.number] = record.payload
        elif all(number in waiting for number in record.numbers):
            payloads = [waiting.pop(number) for number in sorted(record.numbers)]
            yield ArchivedBatch(record.step, tuple(packing.decode_put(packing.from_bytes(payload)) for payload in payloads))


def committed_step(queue_dir: Path) -> int:
    """Learner steps whose groups the queue has given up; 0 where there is no journal. Reads the newest segment that has it."""
    for path in sorted(queue_dir.glob("[0-9]*.log"), reverse=True):
        data, at, state = path.read_bytes(), 0, None
        while (found := parse(data, at)) is not None:
            record, at = found
            state = record if isinstance(record, QueueSnapshot) else state
        if state is not None:
            return state.committed_step
    return 0
