"""What the hub refused, counted by reason. The log gets a line a tick however much comes: whoever sends rubbish at full speed
must not fill the disk.
"""

from __future__ import annotations

import logging
from collections import Counter

from buffers.errors import RefusedError, WeightsError, WireError
from buffers.protocol.wire import Refused

_log = logging.getLogger(__name__)


class Refusals:
    """`counts`: since the hub began, by reason. Reasons are words of our own, never of a peer's."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._last = ""

    def note(self, error: WireError | RefusedError | WeightsError, who: str) -> Refused:
        """Count it; the answer for who said it."""
        reason = "weights" if isinstance(error, WeightsError) else error.reason
        detail = error.detail if isinstance(error, RefusedError) else str(error)
        self.counts[reason] += 1
        self._last = f"{reason} from {who}: {detail}"
        return Refused(reason=reason, detail=detail)

    def report(self) -> None:
        """One line for everything since the last report."""
        if self.counts != self._reported:
            _log.warning("refused %s; the last: %s", dict(self.counts - self._reported), self._last)
            self._reported = Counter(self.counts)
