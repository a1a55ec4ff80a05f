"""How often a reward may be called: a limit over a sliding window, exact in every window. No clock, no threads.

A leaky bucket (as in most rate limiters) lets through almost twice its limit in some windows; a provider that counts any
60 seconds then answers 429. Remembering what was let through in the last window costs one entry a call and is exact.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0


class WindowLimit:
    """At most `limit` units in any `window_s` seconds. Owns the times and amounts of the last window."""

    def __init__(self, limit: float, window_s: float = WINDOW_S) -> None:
        self.limit, self.window_s = limit, window_s
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def free_at(self, now: float, amount: float = 1.0) -> float:
        """The earliest time, not before `now`, at which `amount` may be taken; infinity when it exceeds the limit alone."""
        self._forget(now)
        if amount > self.limit:
            return float("inf")
        excess, when = self._sum + amount - self.limit, now
        for taken_at, taken in self._taken:
            if excess <= 0:
                break
            excess -= taken
            when = taken_at + self.window_s
        return when

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take it, allowed or not: what turned out dearer than expected is paid for afterwards."""
        self._taken.append((now, amount))
        self._sum += amount

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] + self.window_s <= now:
            self._sum -= self._taken.popleft()[1]
        if not self._taken:
            self._sum = 0.0
