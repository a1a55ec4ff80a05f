"""The line of group numbers: which were begun, which are open again, which a batch has, which never will be consumed.

Pure arithmetic over numbers; it knows no actor, group or batch. `admission` owns one. A number is

    fresh (>= `next`), open (begun before, to be credited again), consumed (a batch has it), quarantined,
    or in `admission`'s hands (leased or queued)

The window is counted in live numbers from the lowest one that is not ready, as the proof in `bound` needs it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from buffers.queue.bound import Bound


class Line:
    """Numbers 0 to `bound.num_groups` - 1 in the order of their consumption."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self.head = 0  # lowest live number that no batch has
        self.next = 0  # lowest number that was never begun
        self.open: list[int] = []  # sorted: begun before, to be credited again
        self.consumed: set[int] = set()  # numbers above the head that a batch has
        self.quarantined: list[int] = []  # sorted

    def lowest_version(self, number: int) -> int:
        """Lowest version that may sample a token of `number`, given what is quarantined now."""
        return self._bound.lowest_version(number, self.quarantined_below(number))

    def next_number(self) -> int | None:
        """The lowest number that nobody works on, or None when all have been begun."""
        if self.open:
            return self.open[0]
        return self.next if self.next < self._bound.num_groups else None

    def is_open(self, number: int) -> bool:
        return self.next <= number < self._bound.num_groups or number in self.open

    def begin(self, number: int) -> None:
        """Somebody works on this open number now."""
        if number >= self.next:
            self.open.extend(range(self.next, number))
            self.next = number + 1
        else:
            self.open.remove(number)

    def reopen(self, number: int) -> None:
        """Nobody works on this number any more."""
        bisect.insort(self.open, number)

    def quarantine(self, number: int) -> None:
        """This number will never be consumed: everything behind it moves up."""
        bisect.insort(self.quarantined, number)
        self._advance()

    def consume(self, numbers: Iterable[int]) -> None:
        """A batch has these numbers."""
        self.consumed.update(numbers)
        self._advance()

    def quarantined_below(self, number: int) -> int:
        return bisect.bisect_left(self.quarantined, number)

    def rank(self, number: int) -> int:
        """How many live numbers below this one no batch has."""
        below = number - self.head - (self.quarantined_below(number) - self.quarantined_below(self.head))
        return below - sum(consumed < number for consumed in self.consumed)

    def is_quarantined(self, number: int) -> bool:
        place = bisect.bisect_left(self.quarantined, number)
        return place < len(self.quarantined) and self.quarantined[place] == number

    def pick(self, ready: Callable[[int], bool], wanted: int) -> list[int]:
        """The lowest `wanted` ready numbers that lie within the window of the lowest one that is not ready."""
        picked: list[int] = []
        reach: int | None = None
        for number in range(self.head, self.next):
            if number in self.consumed or self.is_quarantined(number):
                continue
            position = number - self.quarantined_below(number)
            if len(picked) == wanted or (reach is not None and position >= reach):
                break
            if ready(number):
                picked.append(number)
            elif reach is None:
                reach = position + self._bound.window
        return picked

    def restore(self, head: int, consumed: Iterable[int], quarantined: Iterable[int], queued: Iterable[int]) -> None:
        """Begin where a journal ends; numbers begun but in none of these places are open again."""
        self.head, self.consumed, self.quarantined = head, set(consumed), sorted(quarantined)
        known = {*queued, *self.consumed, *self.quarantined}
        self.next = max([head - 1, *known]) + 1
        self.open = [number for number in range(head, self.next) if number not in known]

    def _advance(self) -> None:
        while self.head < self._bound.num_groups and (self.head in self.consumed or self.is_quarantined(self.head)):
            self.consumed.discard(self.head)
            self.head += 1
