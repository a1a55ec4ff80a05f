"""What one reward is shown of completions before they end: the newest there is of each, one call at a time. Pure.

Shown is only when no score is asked for, so a score waits for one such call at most; and so many completions a call that it
ends within about `CALL_S`: twice as many after one that did, half as many after one that did not. A reward that is slower
than decoding falls behind and skips what came between; no completion waits for it here twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

CALL_S = 0.05


class Peek(NamedTuple):
    """One call: by stream, what there is of completions; and the streams that nobody waits for any more."""

    members: Mapping[int, Mapping[str, Any]]
    forgotten: tuple[int, ...]


class Ahead:
    """See the module docstring. Called by one thread."""

    def __init__(self, most: int) -> None:
        """most: completions in one call."""
        self._most, self._size = most, 1
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._forgotten: list[int] = []
        self._is_running = False

    def offer(self, stream: int, member: Mapping[str, Any]) -> None:
        """There is more of a completion; what was not shown of it before is shown with this."""
        self._waiting[stream] = member

    def ended(self, stream: int) -> None:
        """It is whole, and scored next: no need to show it."""
        self._waiting.pop(stream, None)

    def forget(self, streams: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for stream in streams:
            self._waiting.pop(stream, None)
            self._forgotten.append(stream)

    def due(self) -> Peek | None:
        """What to show now, while no score is asked for; None when there is nothing, or a call runs."""
        if self._is_running or not (self._waiting or self._forgotten):
            return None
        streams = list(islice(self._waiting, self._size))
        peek = Peek({stream: self._waiting.pop(stream) for stream in streams}, tuple(self._forgotten))
        self._forgotten.clear()
        self._is_running = True
        return peek

    def shown(self, seconds: float) -> None:
        """The call has ended."""
        self._is_running = False
        self._size = min(self._most, 2 * self._size) if seconds < CALL_S else max(1, self._size // 2)
