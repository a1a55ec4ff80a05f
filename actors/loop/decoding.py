"""When an actor's engine decoded and when it had nothing to do: which hides the time of scoring, and marks on a trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from async_rlhf.buffers.stages import Activity, StageTime

RecordSpan = Callable[[str, float, float], None]
"""(what it was, began, ended): a mark for a trace; seconds since the epoch."""

# Between two steps the loop receives messages and collects scores: less than this is part of decoding.
_PAUSE_S = 0.02


def record_nothing(what: str, began: float, ended: float) -> None: ...


class Decoding:
    """Owns the stretches in which the engine decoded, as far back as `forget` leaves them. Called by the actor's loop."""

    def __init__(self, record: RecordSpan = record_nothing) -> None:
        self._stretches, self._record = Activity(), record
        self._until = time.time()

    def stepped(self, began: float) -> None:
        """The engine has just decoded, since `began`."""
        if began < self._until:  # the clock was set back: no stretch before that can be compared with what comes
            self._stretches, self._until = Activity(), began
        if began - self._until > _PAUSE_S:
            self._record("idle", self._until, began)
        else:
            began = self._until
        self._until = max(began, time.time())
        self._stretches.add(began, self._until)

    def overlap(self, began: float, ended: float) -> StageTime:
        """A stage that ran then, with those of its seconds in which the engine decoded."""
        ended = max(began, ended)  # the clock may have been set back meanwhile
        return StageTime(began, ended, self._stretches.covers(began, ended))

    def forget(self, before: float) -> None:
        self._stretches.forget(before)
