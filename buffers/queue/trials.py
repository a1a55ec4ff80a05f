"""Batches that end the learner, and which of their groups does it. Values only; `admission` owns one.

A batch that was held by `max_attempts` learners that ended before they had trained on it is tried group by group: the learner
is given each one alone, to do all of a step but the update. The group that ends it alone is taken out of the batch; one that
passes is never suspected again. When all that is left has passed, the batch is given as it then is.

Not remembered by the journal: a hub that begins counts anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Trials:
    """trying: the group that the learner works on alone now, by its own account: what was lost on the way to it is not."""

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
