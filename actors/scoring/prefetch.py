"""Which unfinished completions a reward with incremental scoring reads next. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PREFETCH_CALL_S = 0.05


class PrefetchBatch(NamedTuple):
    """One prefetch call. members: by stream, the completion so far. forgotten: streams that are no longer needed."""

    members: Mapping[int, Mapping[str, Any]]
    forgotten: tuple[int, ...]


class Prefetch:
    """The unfinished completions one reward may read next: the newest text of each, one call at a time. Single-threaded.

    A prefetch runs only while no score is due, so a score waits for one such call at most. Its size doubles after a call
    shorter than `PREFETCH_CALL_S` and halves after a longer one. A reward slower than decoding skips intermediate texts.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size, self._size = max_size, 1
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._forgotten: list[int] = []
        self._is_running = False

    def offer(self, stream: int, member: Mapping[str, Any]) -> None:
        """A longer text replaces a waiting shorter one."""
        self._waiting[stream] = member

    def ended(self, stream: int) -> None:
        """The completion is whole and is scored next."""
        self._waiting.pop(stream, None)

    def forget(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._waiting.pop(stream, None)
            self._forgotten.append(stream)

    def due(self) -> PrefetchBatch | None:
        """The next call, None when nothing waits or a call runs. Called while no score is due."""
        if self._is_running or not (self._waiting or self._forgotten):
            return None
        streams = list(itertools.islice(self._waiting, self._size))
        batch = PrefetchBatch({stream: self._waiting.pop(stream) for stream in streams}, tuple(self._forgotten))
        self._forgotten.clear()
        self._is_running = True
        return batch

    def shown(self, seconds: float) -> None:
        """The call has ended after `seconds`."""
        self._is_running = False
        self._size = min(self._max_size, 2 * self._size) if seconds < PREFETCH_CALL_S else max(1, self._size // 2)
