"""Whether completions have the same bits wherever and whenever they are made (`queue.exact`, `queue.max_staleness = 0`).

Every actor computes the same completions before it joins. Where one cannot promise their bits, or has others than the actors
before it (another processor, other libraries), and where a run goes on with another processor, the promise is withdrawn: by an
event, and in the manifest. The run goes on.

    owns        `bits` of the run's manifest
    waits for   nothing
    woken by    the supervisor's poll; the hub's status is read once a second
    on close    nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.run.manifest import RecordedBits
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.child import Every

_STATUS_S = 1.0


class BitsPromise:
    """event: called with a message about a withdrawn promise."""

    def __init__(self, run: RunDir, event: Callable[[str], None], now: Callable[[], float]) -> None:
        self._run, self._event, self._is_due = run, event, Every(_STATUS_S, now)
        self._known = run.bits()
        if self._known is not None and self._known.obstacle:
            self._say(self._known.obstacle)

    def look(self, *, is_last: bool = False) -> None:
        """Never waits. Where the manifest cannot be written the event remains."""
        if self._known is None or self._known.obstacle or not (is_last or self._is_due()):
            return
        with suppress(DamagedError, OSError):
            bits = judged(self._known, self._run.read_ledger().get("bits", ()))
            if bits != self._known:
                self._known = bits
                if bits.obstacle:
                    self._say(bits.obstacle)
                self._run.keep_bits(bits)

    def _say(self, obstacle: str) -> None:
        self._event(
            f"bits are not promised: {obstacle}. A run that was killed may differ from an uninterrupted one in rounding"
        )


def judged(known: RecordedBits, actors: Iterable[Sequence[str]]) -> RecordedBits:
    """The promise after these actors have joined, in this order: name, digest or empty, obstacle or empty."""
    for name, digest, obstacle in actors:
        if obstacle:
            return RecordedBits(obstacle=f"{name}: {obstacle}")
        if known.digest and digest != known.digest:
            return RecordedBits(
                obstacle=f"{name} computes other bits than the actors before it (another processor, or other libraries)"
            )
        known = RecordedBits(digest)
    return known
