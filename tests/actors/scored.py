"""Waiting for a scoring pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import TypeVar

from async_rlhf.actors.scoring.pool import Scored, ScoringPool

Key = TypeVar("Key", bound=Hashable)


def wait_scored(
    pool: ScoringPool[Key], answered: threading.Event, *, pending: int = 0, limit_s: float = 300.0
) -> dict[Key, Scored[Key]]:
    """What is scored when all but `pending` completions are, or after `limit_s`. answered: what the pool wakes."""
    found: dict[Key, Scored[Key]] = {}
    until = time.monotonic() + limit_s
    while pool.num_pending > pending and time.monotonic() < until:
        # Silence is worth a look too: a worker that dies idle is noticed by `poll`, not announced.
        answered.wait(0.1)
        answered.clear()
        found |= {done.key: done for done in pool.poll()}
    return found
