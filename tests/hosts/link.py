"""One direction of a link between two hosts: when the frames that are sent arrive."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

BACKLOG = 1_000_000  # bytes that wait for a link with a rate; a full one drops, as a router's queue does


@dataclass(frozen=True)
class Conditions:
    """What a link does to frames. Probabilities are per frame, times in seconds, sizes in bytes."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """Probability that a frame is not delayed, and so overtakes."""
    rate: float = 0.0
    """Bits a second; 0: unlimited."""
    largest: int = 0
    """Larger frames are lost and no error tells it, as behind a tunnel; 0: none is."""
    cut: bool = False

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            assert 0 <= getattr(self, name) <= 1, f"{name} is a probability"


class Link:
    """Decides for each frame when it arrives, in order of time; random numbers are drawn from the given generator alone."""

    def __init__(self, conditions: Conditions, random: Random) -> None:
        self.conditions = conditions
        self._random = random
        self._free_at = 0.0
        self._last = 0.0

    def arrivals(self, now: float, size: int) -> list[float]:
        """Times at which a frame of `size` bytes that is sent at `now` arrives: none if it is lost, two if it is duplicated."""
        it = self.conditions
        if it.cut or (it.largest and size > it.largest) or (it.loss and self._random.random() < it.loss):
            return []
        sent = now
        if it.rate:
            begins = max(now, self._free_at)
            if (begins - now) * it.rate / 8 > BACKLOG:
                return []
            sent = self._free_at = begins + size * 8 / it.rate
        overtakes = it.reorder > 0 and self._random.random() < it.reorder
        arrival = sent
        if not overtakes:
            jitter = self._random.uniform(-it.jitter_s, it.jitter_s) if it.jitter_s else 0.0
            arrival = self._last = max(sent + max(it.delay_s + jitter, 0.0), self._last)
        duplicated = it.duplicate > 0 and self._random.random() < it.duplicate
        return [arrival] * (2 if duplicated else 1)
