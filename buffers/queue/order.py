"""The order in which groups are consumed, and the batches they were consumed in. Pure; `admission` owns one of each.

A number is

    fresh (>= `next`), open (begun before, to be credited again), consumed (a batch has it), dead (quarantined or
    filtered: never to be consumed), or in `admission`'s hands (leased or queued)

The position of a number is how many live ones are below it. The window is counted in live numbers from the lowest one that
is not ready, as the proof in `bound` needs it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry


class ConsumptionOrder:
    """Numbers 0 to `bound.num_numbers` - 1 in the order of their consumption."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound  # replaced when there are more numbers
        self.head = 0  # lowest live number that no batch has
        self.next = 0  # lowest number that was never begun
        self.open: list[int] = []  # sorted: begun before, to be credited again
        self.consumed: set[int] = set()  # numbers above the head that a batch has
        self.quarantined: list[int] = []  # sorted
        self.filtered: list[int] = []  # sorted: those that may still matter
        self.filtered_before = 0  # how many there are below them

    def lowest_version(self, number: int) -> int:
        """Lowest version that may sample a token of `number`, given what is dead now."""
        return self.bound.lowest_version(number, self.dead_below(number))

    def next_number(self) -> int | None:
        """The lowest number that no actor works on, or None when all that are needed have been begun."""
        if self.open:
            return self.open[0]
        exists = self.next < self.bound.num_numbers
        return self.next if exists and self._position(self.next) < self.bound.num_groups else None

    @property
    def upcoming(self) -> int | None:
        """`next_number`, or where there is none the number that may come next."""
        number = self.next_number()
        return self.next if number is None and self.bound.coming else number

    def extend(self, numbers: int, *, coming: bool) -> None:
        """Set how many numbers exist, never fewer than before. coming: as in `Bound`; once false it stays false."""
        if (numbers, coming) != (self.bound.numbers, self.bound.coming):
            assert numbers >= self.bound.num_numbers and (self.bound.coming or not coming)
            self.bound = replace(self.bound, numbers=numbers, coming=coming)

    @property
    def num_filtered(self) -> int:
        return self.filtered_before + len(self.filtered)

    @property
    def num_consumable(self) -> int:
        """How many groups can be consumed in all, as far as there are live numbers for them or may be."""
        live = self.bound.num_numbers - len(self.quarantined) - self.num_filtered
        return self.bound.num_groups if self.bound.coming else min(self.bound.num_groups, live)

    def is_open(self, number: int) -> bool:
        return self.next <= number < self.bound.num_numbers or number in self.open

    def is_decided(self, number: int) -> bool:
        """Whether a batch has (or had) this number, or it is dead."""
        return number < self.head or number in self.consumed or self.is_dead(number)

    def begin(self, number: int) -> None:
        """An actor works on this open number now."""
        if number >= self.next:
            self.open.extend(range(self.next, number))
            self.next = number + 1
        else:
            self.open.remove(number)

    def reopen(self, number: int) -> None:
        """No actor works on this number any more."""
        bisect.insort(self.open, number)

    def quarantine(self, number: int) -> None:
        """This number will never be consumed: everything behind it moves up."""
        if self.is_open(number):
            self.begin(number)
        bisect.insort(self.quarantined, number)
        self._advance()

    def may_filter(self, number: int) -> bool:
        """Whether `number` is among the first of its batch that may be filtered (see `bound`)."""
        size = self.bound.groups_per_batch
        before = self._position(number) // size * size  # live numbers in the batches before
        return number - (self._number_at(before - 1) + 1 if before else 0) < self.bound.refills * size

    def filter(self, number: int) -> None:
        """This number has no advantage and will never be consumed: everything behind it moves up."""
        bisect.insort(self.filtered, number)
        self._advance()

    def consume(self, numbers: Iterable[int]) -> None:
        """A batch has these numbers."""
        self.consumed.update(numbers)
        self._advance()

    def dead_below(self, number: int) -> int:
        filtered = self.filtered_before + bisect.bisect_left(self.filtered, number)
        return filtered + bisect.bisect_left(self.quarantined, number)

    def is_dead(self, number: int) -> bool:
        return _holds(self.quarantined, number) or _holds(self.filtered, number)

    def pick(self, ready: Callable[[int], bool], wanted: int) -> list[int]:
        """The lowest `wanted` ready numbers that lie within the window of the lowest one that is not ready."""
        picked: list[int] = []
        reach: int | None = None
        for number in range(self.head, self.next):
            if number in self.consumed or self.is_dead(number):
                continue
            position = self._position(number)
            if len(picked) == wanted or (reach is not None and position >= reach):
                break
            if ready(number):
                picked.append(number)
            elif reach is None:
                reach = position + self.bound.window
        return picked

    def floor(self, uncommitted: Iterable[int]) -> int:
        """The lowest number that still matters when batches hold these: the dead right below belong to the next batch."""
        lowest = min([self.head, *uncommitted])
        while self.is_dead(lowest - 1):
            lowest -= 1
        return lowest

    def forget_below(self, floor: int) -> None:
        """Keep only the count of the filtered numbers below the floor."""
        place = bisect.bisect_left(self.filtered, floor)
        self.filtered_before += place
        del self.filtered[:place]

    def restore(self, past: QueueSnapshot, queued: Iterable[int]) -> None:
        """Begin where a journal ends; numbers begun but in none of these places are open again."""
        self.head, self.consumed, self.quarantined = past.head, set(past.consumed), sorted(past.quarantined)
        self.filtered, self.filtered_before = sorted(past.filtered), past.filtered_before
        known = {*queued, *self.consumed, *self.quarantined, *self.filtered}
        self.next = max([past.head - 1, *known]) + 1
        self.open = [number for number in range(past.head, self.next) if number not in known]
        self._advance()

    def _position(self, number: int) -> int:
        return number - self.dead_below(number)

    def _number_at(self, position: int) -> int:
        """The live number that has this position: the lowest n with n - (dead ones up to n) = position."""
        number = position
        while (further := position + self.dead_below(number + 1)) != number:
            number = further
        return number

    def _advance(self) -> None:
        while self.head < self.bound.num_numbers and (self.head in self.consumed or self.is_dead(self.head)):
            self.consumed.discard(self.head)
            self.head += 1


def _holds(numbers: Sequence[int], number: int) -> bool:
    place = bisect.bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number


class Batches:
    """Batches that the learner may go back to: a batch is committed when every kept checkpoint was made after its step.

    `of`: the groups of each uncommitted batch, by step. `taken`: those the present learner holds or has trained. `removed`:
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
