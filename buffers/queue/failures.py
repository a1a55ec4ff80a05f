"""How often each group was lost and why; which are suspects, which were quarantined. Values only; `admission` owns one.

A group that was lost with its actor is not yet a bad group: the machine may be. So from the last attempt but one on it is a
suspect and is made alone, and only when it ends an actor alone is it quarantined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Of each group this many reasons are kept, the newest, each so long.
_MAX_REASONS, _MAX_LENGTH = 8, 300


class Failures:
    """Counts and reasons by group number, of groups that are neither committed nor quarantined; and the quarantine's."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._counts: dict[int, int] = {}
        self._reasons: dict[int, list[str]] = {}
        self._blamed: dict[int, str] = {}
        self.suspects: set[int] = set()  # lost so often that one more failure quarantines them
        self.quarantined: dict[int, tuple[int, tuple[str, ...]]] = {}  # number -> attempts, and why the newest failed

    def attempt(self, number: int) -> int:
        """Number of the next attempt: how often the group was lost before."""
        return self._counts.get(number, 0)

    def blame(self, number: int, reason: str) -> None:
        """What was wrong with this attempt, should it fail: a group that is refused ends its actor."""
        self._blamed[number] = reason[:_MAX_LENGTH]

    def lost(self, number: int, reason: str) -> bool:
        """One attempt more has failed; whether that was the last one and the group is quarantined."""
        attempt = self._counts.get(number, 0)
        blamed = self._blamed.pop(number, "")
        told = f"attempt {attempt}: {blamed + '; then ' if blamed else ''}{reason[:_MAX_LENGTH]}"
        reasons = [*self._reasons.get(number, ()), told][-_MAX_REASONS:]
        if attempt + 1 < self._max_attempts:
            self._counts[number], self._reasons[number] = attempt + 1, reasons
            self._suspect(number)
            return False
        self.forget([number])
        self.quarantined[number] = attempt + 1, tuple(reasons)
        return True

    def forget(self, numbers: Iterable[int]) -> None:
        """These were committed, or will not be made again."""
        for number in numbers:
            self._counts.pop(number, None)
            self._reasons.pop(number, None)
            self._blamed.pop(number, None)
            self.suspects.discard(number)

    def remember(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Number -> how often and why it was lost, for a journal."""
        return {number: (count, tuple(self._reasons[number])) for number, count in self._counts.items()}

    def restore(self, past: Mapping[int, tuple[int, tuple[str, ...]]]) -> None:
        self._counts = {number: count for number, (count, _) in past.items()}
        self._reasons = {number: list(reasons) for number, (_, reasons) in past.items()}
        for number in past:
            self._suspect(number)

    def _suspect(self, number: int) -> None:
        if self._counts[number] >= max(1, self._max_attempts - 1):
            self.suspects.add(number)
