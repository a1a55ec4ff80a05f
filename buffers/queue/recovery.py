"""From a journal to the queue's state: when a hub begins, and when an operator takes a group back of a run that is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.quarantine import Quarantine


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
