"""A run's rollouts read back from its journal, without the run: the batches as they were trained, in order.

Whole only when the journal kept its segments (`queue.keep_rollouts = true`); else what is not committed yet. Only reads:
it takes no lock, cuts nothing off and may look into a living run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import JournalError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.segment import Put, parse, records
from async_rlhf.buffers.record import Group


@dataclass(frozen=True)
class ArchivedBatch:
    """The groups of learner step `step` (counted from 0), in the order in which they were trained."""

    step: int
    groups: tuple[Group, ...]


def read_batches(queue_dir: Path) -> Iterator[ArchivedBatch]:
    """Every batch whose groups are in the journal, by ascending step.

    Raises JournalError for a damaged segment, and for a directory that holds no journal.
    """
    waiting: dict[int, bytes] = {}
    for record in records(queue_dir):
        if isinstance(record, Put):
            waiting[record.number] = record.payload
        elif all(number in waiting for number in record.numbers):
            payloads = [waiting.pop(number) for number in sorted(record.numbers)]
            yield ArchivedBatch(record.step, tuple(_group(payload) for payload in payloads))


def committed_step(queue_dir: Path) -> int:
    """Learner steps whose groups the queue has given up; 0 where there is no journal. Reads the newest segment that says it."""
    for path in sorted(queue_dir.glob("[0-9]*.log"), reverse=True):
        data, at, state = path.read_bytes(), 0, None
        while (found := parse(data, at)) is not None:
            record, at = found
            state = record if isinstance(record, QueueSnapshot) else state
        if state is not None:
            return state.committed_step
    return 0


def _group(payload: bytes) -> Group:
    _, message, arrays = wire.decode(packing.from_bytes(payload), max_frame_bytes=wire.MAX_FRAME_BYTES)
    if not isinstance(message, wire.Put):
        raise JournalError(f"a group's place in the journal holds a {message.type!r}")
    return packing.unpack_group(message.group, arrays)
