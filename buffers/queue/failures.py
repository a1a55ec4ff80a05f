"""Groups that end actors (`Failures`) or the learner (`Trials`). Values only; `admission` owns one of each.

Every attempt that is lost has a number of its own. Whether it counts is another question: silence proves nothing about a
group, so only the end of its actor that was seen counts, and a lack of progress. And a group that was lost with its actor is
not yet a bad group: the machine may be. So from the last count but one on it is a suspect and is made alone, and only when
it ends an actor alone is it quarantined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

# Of each group this many reasons are kept, the newest, each so long.
_MAX_REASONS, _MAX_LENGTH = 8, 300

Past = tuple[int, int, tuple[str, ...]]
"""Attempts lost, how many of them count, why the newest were lost."""


class Failures:
    """Counts and reasons by group number, of groups that are neither committed nor quarantined; and the quarantine's."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._attempts: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._reasons: dict[int, list[str]] = {}
        self._blamed: dict[int, str] = {}
        self._stuck: dict[int, int] = {}  # number -> the attempt that made no progress
        self.suspects: set[int] = set()  # one more loss that counts quarantines them
        self.quarantined: dict[int, tuple[int, tuple[str, ...]]] = {}  # number -> attempts, and why the newest failed

    def attempt(self, number: int) -> int:
        """Number of the next attempt: how often the group was lost before."""
        return self._attempts.get(number, 0)

    def blame(self, number: int, reason: str) -> None:
        """Note a reason in case this attempt fails: a group that is refused ends its actor."""
        self._blamed[number] = reason[:_MAX_LENGTH]

    def lost(self, number: int, reason: str, *, counts: bool) -> bool:
        """Note a lost attempt; returns whether it quarantines the group."""
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        blamed = self._blamed.pop(number, "")
        self._note(number, f"attempt {attempt - 1}: {blamed + '; then ' if blamed else ''}{reason[:_MAX_LENGTH]}")
        return self.charge(number) if counts else False

    def stuck(self, number: int, attempt: int, reason: str) -> bool:
        """This attempt is lost, because it makes no progress; returns whether that quarantines the group."""
        self._stuck[number] = attempt
        return self.lost(number, reason, counts=True)

    def is_stuck(self, number: int, attempt: int) -> bool:
        return self._stuck.get(number) == attempt

    def charge(self, number: int, reason: str = "") -> bool:
        """Count a lost attempt; returns whether that quarantines the group."""
        if reason:
            self._note(number, reason)
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._counts[number] < self._max_attempts:
            self._suspect(number)
            return False
        self.quarantine(number)
        return True

    def quarantine(self, number: int, reason: str = "") -> None:
        """The group is never made or consumed again."""
        if reason:
            self._note(number, reason)
        record = self._attempts.get(number, 0), tuple(self._reasons.get(number, ()))
        self.forget([number])
        self.quarantined[number] = record

    def forget(self, numbers: Iterable[int]) -> None:
        """These were committed, or will not be made again."""
        for number in numbers:
            for known in (self._attempts, self._counts, self._reasons, self._blamed, self._stuck):
                known.pop(number, None)
            self.suspects.discard(number)

    def remember(self) -> dict[int, Past]:
        """The past of each number, for a journal."""
        reasons = self._reasons
        return {n: (lost, self._counts.get(n, 0), tuple(reasons.get(n, ()))) for n, lost in self._attempts.items()}

    def restore(self, past: Mapping[int, Past]) -> None:
        for number, (attempts, count, reasons) in past.items():
            self._attempts[number], self._reasons[number] = attempts, list(reasons)
            if count:
                self._counts[number] = count
                self._suspect(number)

    def _note(self, number: int, reason: str) -> None:
        self._reasons[number] = [*self._reasons.get(number, ()), reason[: 2 * _MAX_LENGTH]][-_MAX_REASONS:]

    def _suspect(self, number: int) -> None:
        if self._counts[number] >= max(1, self._max_attempts - 1):
            self.suspects.add(number)


class Trials:
    """Batches that end the learner, and which of their groups does it.

    A batch that was held by `max_attempts` learners that ended before they had trained on it is tried group by group: the
    learner is given each one alone, to do all of a step but the update. The group that ends it alone is taken out of the
    batch; one that passes is never suspected again. When all that is left has passed, the batch is given as it then is.
    Not in the journal: a new hub counts from 0.

    trying: the group that the learner works on alone now, by its own account.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._ended: Counter[int] = Counter()  # batch -> learners that ended with it
        self._passed: set[int] = set()
        self.trying: int | None = None

    def ended(self, step: int) -> int | None:
        """A learner that held batch `step` has ended; the group that it had alone, if it was trying one."""
        guilty, self.trying = self.trying, None
        if guilty is None:
            self._ended[step] += 1
        return guilty

    def next(self, step: int, numbers: Iterable[int]) -> int | None:
        """The group of this batch to be tried now, or None when the whole may be given."""
        self.trying = None
        if self._ended[step] < self._max_attempts:
            return None
        return next((number for number in sorted(numbers) if number not in self._passed), None)

    def passed(self, number: int) -> None:
        """This group alone did not end the learner."""
        self._passed.add(number)
        self.trying = None

    def forget(self, step: int, numbers: Iterable[int]) -> None:
        """Batch `step` has been trained on."""
        self._ended.pop(step, None)
        self._passed.difference_update(numbers)
        self.trying = None
