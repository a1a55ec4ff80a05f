"""A scoring pool as an actor's loop uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardSpec
from async_rlhf.actors.scoring.pool import GroupMember, Scored, ScoringPool
from async_rlhf.buffers.record import Score

FIELDS = {"prompt": "p", "completion_ids": [1, 2, 3], "prompt_ids": [1], "finish_reason": "stop", "answer": "a"}


class Bench:
    """Submits completions to a pool and waits for their scores; fails after five minutes."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        by_source: Mapping[str, Collection[str]] | None = None,
        scorer: str = "",
        images: Path | None = None,
        **settings: Any,
    ) -> None:
        self._answered = threading.Event()
        self.pool = ScoringPool[Any](specs, ScoringConfig(**settings), self._answered.set, scorer, by_source, images=images)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close(60.0)

    def submit(self, key: Any, completion: str, place: GroupMember | None = None, **columns: Any) -> None:
        self.pool.submit(key, {**FIELDS, **columns, "completion": completion}, place)

    def until(self, done: Callable[[], Any]) -> None:
        # Silence is worth a look too: a worker that dies idle is noticed by `poll`, not announced.
        by = time.monotonic() + 300.0
        while not done():
            assert time.monotonic() < by, "waited 300 s for the scoring pool"
            self._answered.wait(0.1)
            self._answered.clear()

    def wait(self, pending: int = 0) -> dict[Any, Scored[Any]]:
        """What is scored when all but so many completions are, by their keys."""
        found: dict[Any, Scored[Any]] = {}

        def look() -> bool:
            found.update({done.key: done for done in self.pool.poll()})
            return self.pool.num_pending == pending

        self.until(look)
        return found

    def score(self, *completions: str, pending: int = 0, **columns: Any) -> list[dict[str, Score]]:
        """The scores of each completion, in order."""
        for key, completion in enumerate(completions):
            self.submit(key, completion, **columns)
        found = self.wait(pending)
        return [dict(found[key].scores) for key in range(len(completions))]

    def one(self, completion: str, **columns: Any) -> Score:
        """The score of a completion by the only reward."""
        (scores,) = self.score(completion, **columns)
        (score,) = scores.values()
        return score
