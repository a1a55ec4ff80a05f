"""Where the learner's batches come from: a hub (`LearnerClient`), or the archive of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from async_rlhf.buffers.clients.learner import SuspectGroup, TakenBatch
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.queue.archive import ArchivedBatch, read_batches
from async_rlhf.buffers.tensors import RawTensor


class BatchSource(Protocol):
    """What the trainer's loop says and hears; see `LearnerClient` for what each call means."""

    def register(self, step: int, committed: int) -> None: ...

    def take(self, step: int, aim: int | None = None) -> TakenBatch | SuspectGroup | str: ...

    def tried(self, suspect: SuspectGroup) -> None: ...

    def trained(self, step: int) -> None: ...

    def commit(self, step: int) -> None: ...

    def publish(self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None = None) -> None: ...


class ArchiveSource:
    """The batches of an earlier run, bit for bit and in the same order; nobody listens to what is published."""

    def __init__(self, queue_dir: Path) -> None:
        self._batches: Iterator[ArchivedBatch] = read_batches(queue_dir)

    def take(self, step: int, aim: int | None = None) -> TakenBatch | str:
        """Batch `step`, or the reason why there is none; raises RefusedError when it was deleted from the archive."""
        for batch in self._batches:
            if batch.step == step:
                return TakenBatch(step, batch.groups, {})
            if batch.step > step:
                raise RefusedError("not-kept", f"the archive has no batch {step}, it goes on at {batch.step}")
        return "end of the archive"

    def tried(self, suspect: SuspectGroup) -> None:
        """No group of an archive is suspected."""

    def register(self, step: int, committed: int) -> None:
        """Nothing to say: the next `take` names its step."""

    def trained(self, step: int) -> None:
        """Nobody counts."""

    def commit(self, step: int) -> None:
        """Nothing may be deleted."""

    def publish(self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None = None) -> None:
        """Nobody adopts."""
