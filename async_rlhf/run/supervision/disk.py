"""The run's disk as the supervisor sees it: logs that have grown long begin anew, and an event warns before it is full.

    owns        nothing
    waits for   nothing
    woken by    the supervisor's poll; it measures every ten seconds
    on close    nothing

A process appends to its log through a descriptor that it has kept from its start, so the file stays and is emptied when a
copy of it lies beside it; what is written between the two is lost. `rollouts.jsonl` and spans begin anew where they are written
(`buffers.lines.LineFile`). Where little room is left the hub begins no further group, so that the run comes to
rest before it must. What happens on a full disk is for those who write: steps wait for room, samples are counted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from async_rlhf.buffers.lines import earlier
from async_rlhf.run.checks.memory import written

_EVERY_S = 10.0
_LOW = 4  # times `disk_pause_bytes`: room for some checkpoints between the report and the pause


class RunDisk:
    """directory: the run's. event: called when there is little room, and when there is enough again. low: instead of it for the
    former."""

    def __init__(
        self,
        directory: Path,
        max_log_bytes: int,
        pause_bytes: int,
        event: Callable[[str], None],
        now: Callable[[], float],
        low: Callable[[str], None] | None = None,
    ) -> None:
        self._directory, self._max_log_bytes, self._low_bytes = directory, max_log_bytes, _LOW * pause_bytes
        self._event, self._low, self._now = event, low or event, now
        self._next_look_at = now()
        self.is_low = False

    def look(self) -> None:
        """Never waits, and raises nothing: a disk that cannot be measured is no reason to end a run."""
        if self._now() < self._next_look_at:
            return
        self._next_look_at = self._now() + _EVERY_S
        try:
            self._shorten_logs()
            self._measure()
        except OSError as error:
            self._event(f"the run's disk cannot be looked after: {error}")

    def _shorten_logs(self) -> None:
        for log in sorted((self._directory / "logs").glob("*.log")):
            if log.stat().st_size > self._max_log_bytes:
                shutil.copyfile(log, earlier(log))
                os.truncate(log, 0)

    def _measure(self) -> None:
        free = shutil.disk_usage(self._directory).free
        was_low, self.is_low = self.is_low, free < self._low_bytes
        if self.is_low and not was_low:
            self._low(
                f"the disk of {self._directory} has {written(free)} left, less than {_LOW} times disk_pause_bytes "
                f"({written(self._low_bytes)}): make room, or the run will wait for it"
            )
        elif was_low and not self.is_low:
            self._event(f"the disk has {written(free)} again")
