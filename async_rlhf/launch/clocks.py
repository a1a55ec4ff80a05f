"""How far the clock of another host is from the supervisor's, measured by round trips (Cristian 1989; NTP's, RFC 5905, with
one reading there instead of two): the reading was taken between the sending of a question and the receiving of its answer.

Pure but for `read_offsets`. Times are seconds since the epoch, of the clock that is named.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from async_rlhf.buffers.lines import read_lines

DRIFT = 1e-4
"""Seconds that two clocks part in a second, at most: quartz without a time service is twice as good."""
_KEPT_S = 60.0


class Offset(NamedTuple):
    """there: a reading of the host's clock. offset_s: add it for the supervisor's time then. error_s: wrong by no more."""

    there: float
    offset_s: float
    error_s: float

    def error_at(self, there: float) -> float:
        """By how much it may be wrong at another time of the host's clock, if nothing has set that clock."""
        return self.error_s + DRIFT * abs(there - self.there)


def measured(sent: float, there: float, received: float) -> Offset:
    """Of one round trip. sent, received: of the clock here; there: read meanwhile. The error is half the trip."""
    return Offset(there, (sent + received) / 2 - there, (received - sent) / 2)


def is_news(last: Offset | None, new: Offset) -> bool:
    """Whether `new` is worth keeping: it is the first, twice as sure, a minute younger and as sure, or one of the clocks was
    set since."""
    if last is None:
        return True
    was_set = abs(new.offset_s - last.offset_s) > new.error_s + last.error_at(new.there)
    is_late = abs(new.there - last.there) >= _KEPT_S and new.error_s <= last.error_at(new.there)
    return was_set or is_late or 2 * new.error_s < last.error_s


def correction(offsets: Sequence[Offset], there: float) -> float:
    """Seconds to add to a time of the host's clock; 0 where nothing is known. offsets: in the order of their readings."""
    after = bisect_left(offsets, (there,))
    near = offsets[max(0, after - 2) : after + 2]
    return min(near, key=lambda offset: offset.error_at(there)).offset_s if near else 0.0


def read_offsets(path: Path) -> list[Offset]:
    """What was written there (`connection`), in the order of the readings; nothing where there is no file."""
    return sorted(Offset(line["there"], line["offset_s"], line["error_s"]) for line in read_lines(path))
