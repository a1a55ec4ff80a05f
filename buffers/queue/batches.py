"""The batches that a learner may still go back to, and how much lies before them. Values only; `admission` owns one.

A batch is committed when every checkpoint that is kept was made after its step.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_rlhf.buffers.queue.ledger import Entry


class Batches:
    """`of`: the groups of each uncommitted batch, by step. `taken`: those the present learner holds or has trained. `removed`:
    groups that were taken out of one, for good."""

    def __init__(self) -> None:
        self.of: dict[int, Mapping[int, Entry]] = {}
        self.taken: set[int] = set()
        self.removed: set[int] = set()
        self.committed_groups = self.committed_tokens = 0

    @property
    def numbers(self) -> set[int]:
        """The groups of all batches that are not committed."""
        return {number for batch in self.of.values() for number in batch}

    @property
    def num_consumed(self) -> int:
        """Groups that are in a batch, committed or not, or were taken out of one."""
        return self.committed_groups + sum(map(len, self.of.values())) + len(self.removed)

    def step_of(self, number: int) -> int | None:
        """The uncommitted batch that has this group."""
        return next((step for step, batch in self.of.items() if number in batch), None)

    def remove(self, step: int, number: int) -> None:
        """Take a group out of its batch; none comes in its place, so that the other batches stay as they are."""
        self.of[step] = {other: entry for other, entry in self.of[step].items() if other != number}
        self.removed.add(number)

    def commit(self, step: int) -> list[int]:
        """Commit the batches before `step`; returns their groups."""
        numbers: list[int] = []
        for index in sorted(index for index in self.of if index < step):
            batch = self.of.pop(index)
            self.taken.discard(index)
            numbers += batch
            self.committed_tokens += sum(entry.num_tokens for entry in batch.values())
        self.committed_groups += len(numbers)
        return numbers

    def split(self, step: int) -> tuple[list[Entry], list[Entry], list[Entry]]:
        """Groups trained on when the learner has done `step` steps, those it holds, and those it is to be offered again."""
        trained, held, waiting = list[Entry](), list[Entry](), list[Entry]()
        for index, batch in self.of.items():
            (trained if index < step else held if index in self.taken else waiting).extend(batch.values())
        return trained, held, waiting
