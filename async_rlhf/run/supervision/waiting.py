"""Whether a run waits for something that its operator brings, and for nothing else: prompts, or room on the disk.

    owns        nothing
    waits for   nothing
    woken by    the supervisor's poll; it reads what the hub has written, once a second
    on close    nothing

Such a wait is no stall, however long it is. Once the hub has not written for some seconds, it may be one.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.run.run_dir import RunDir

_LOOK_S = 1.0
_FRESH_S = 5.0  # the hub writes its status twice a second
_BEGINS = {
    "lacks_room": "waiting for room on the disk (disk_pause_bytes)",
    "lacks_prompts": "waiting for prompts: the spool has none",
}
_ENDS = {"lacks_room": "there is room on the disk again", "lacks_prompts": "there are prompts again"}


class OperatorWait:
    """event: called when such a wait begins and ends."""

    def __init__(self, run: RunDir, say: Callable[[str], None], now: Callable[[], float]) -> None:
        self._run, self._say, self._now = run, say, now
        self._looked_at = now()
        self._written, self._written_at = 0, now()
        self._lacks = ""

    def waits(self) -> bool:
        """By the last look."""
        if self._now() - self._looked_at >= _LOOK_S:
            self._looked_at = self._now()
            before, self._lacks = self._lacks, self._look()
            if before and before != self._lacks:
                self._say(_ENDS[before])
            if self._lacks and before != self._lacks:
                self._say(_BEGINS[self._lacks])
        return bool(self._lacks)

    def _look(self) -> str:
        try:
            written = self._run.ledger.stat().st_mtime_ns
            if written != self._written:
                self._written, self._written_at = written, self._now()
            if self._now() - self._written_at >= _FRESH_S:
                return ""
            ledger = self._run.read_ledger()
            return next((lack for lack in _BEGINS if ledger.get(lack) is True), "")
        except (OSError, DamagedError):
            return ""
