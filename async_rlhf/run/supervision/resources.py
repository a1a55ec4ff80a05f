"""The resources of a run that the supervisor watches: room on the disk, and prompts.

    owns        nothing
    waits for   nothing
    woken by    the supervisor's poll; the disk is measured every ten seconds, the hub's status read once a second
    on close    nothing

A process appends to its log through a descriptor that it has kept from its start, so a log that has grown long stays and is
emptied when a copy of it lies beside it; what is written between the two is lost. `rollouts.jsonl` and spans begin anew where
they are written (`buffers.lines.LineFile`). Where little room is left the hub begins no further group, so that the run comes to
rest before it must. What happens on a full disk is for those who write: steps wait for room, samples are counted.

A wait for the operator alone is no stall, however long it is. Once the hub has not written for some seconds, it may be one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import written
from async_rlhf.buffers.lines import earlier
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.child import Every

_MEASURE_S = 10.0
_LOW = 4  # times `disk_pause_bytes`: room for some checkpoints between the report and the pause
_STATUS_S, _FRESH_S = 1.0, 5.0  # the hub writes its status twice a second
# Messages at the beginning and at the end of a wait, by the key of the hub's status.
_WAITS = {
    "waits_for_room": ("waiting for room on the disk (disk_pause_bytes)", "there is room on the disk again"),
    "waits_for_prompts": ("waiting for prompts: the spool has none", "there are prompts again"),
}


class RunDisk:
    """low: called when there is little room; event: when there is enough again. now: see `SupervisedTime`."""

    def __init__(
        self,
        run: RunDir,
        max_log_bytes: int,
        pause_bytes: int,
        event: Callable[[str], None],
        low: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._directory, self._max_log_bytes, self._low_bytes = run.path, max_log_bytes, _LOW * pause_bytes
        self._event, self._low, self._is_due = event, low, Every(_MEASURE_S, now)
        self.is_low = False

    def look(self) -> None:
        """Never waits, and raises nothing: a disk that cannot be measured is no reason to end a run."""
        if not self._is_due():
            return
        try:
            for log in sorted((self._directory / "logs").glob("*.log")):
                if log.stat().st_size > self._max_log_bytes:
                    shutil.copyfile(log, earlier(log))
                    os.truncate(log, 0)
            self._measure()
        except OSError as error:
            self._event(f"the run's disk cannot be looked after: {error}")

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


class OperatorWait:
    """Whether the run waits for its operator alone. event: called when such a wait begins and ends."""

    def __init__(self, run: RunDir, event: Callable[[str], None], now: Callable[[], float]) -> None:
        self._run, self._event, self._now, self._is_due = run, event, now, Every(_STATUS_S, now)
        self._written, self._written_at = 0, now()
        self._waits_for = ""

    def waits(self) -> bool:
        """Whether the run waited at the last look."""
        if self._is_due():
            before, self._waits_for = self._waits_for, self._look()
            if before and before != self._waits_for:
                self._event(_WAITS[before][1])
            if self._waits_for and before != self._waits_for:
                self._event(_WAITS[self._waits_for][0])
        return bool(self._waits_for)

    def _look(self) -> str:
        try:
            changed = self._run.ledger.stat().st_mtime_ns
            if changed != self._written:
                self._written, self._written_at = changed, self._now()
            if self._now() - self._written_at >= _FRESH_S:
                return ""
            ledger = self._run.read_ledger()
            return next((lack for lack in _WAITS if ledger.get(lack) is True), "")
        except (OSError, DamagedError):
            return ""
