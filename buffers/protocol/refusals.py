"""What the hub refused, counted by reason. The log gets one line a tick: a peer that sends rubbish at full speed
must not fill the disk.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from async_rlhf.buffers.errors import RefusedError, WeightsError, WireError
from async_rlhf.buffers.protocol.wire import Refused

_log = logging.getLogger(__name__)
_MAX_PLACES = 100


class Refusals:
    """`counts`: since the hub began, by reason. Reasons are words of our own, never of a peer's."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._last = ""
        self._known: set[tuple[str, int | None]] = set()  # where unforeseen errors came from

    def note(self, error: Exception, who: str) -> Refused:
        """Count it; the answer for who sent it. What is none of our errors is a defect, and counted as `unforeseen`."""
        if isinstance(error, WireError | RefusedError):
            reason, detail = error.reason, error.detail if isinstance(error, RefusedError) else str(error)
        elif isinstance(error, WeightsError):
            reason, detail = "weights", str(error)
        else:
            reason, detail = "unforeseen", f"a defect of the hub: {error!r}"[:300]
            self._log_once(error, who)
        self.counts[reason] += 1
        self._last = f"{reason} from {who}: {detail}"
        return Refused(reason=reason, detail=detail)

    def _log_once(self, error: Exception, who: str) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = place.filename, place.lineno
        if where not in self._known and len(self._known) < _MAX_PLACES:
            self._known.add(where)
            _log.error("unforeseen, in a message from %s; please report it", who, exc_info=error)

    def report(self) -> None:
        """One line for everything since the last report."""
        if self.counts != self._reported:
            _log.warning("refused %s; the last: %s", dict(self.counts - self._reported), self._last)
            self._reported = Counter(self.counts)
