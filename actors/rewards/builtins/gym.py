"""reasoning-gym's own scorers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from async_rlhf.actors.gym_tasks import get_score_answer_fn
from async_rlhf.actors.rewards.settings import reward


@reward
def reasoning_gym(completion: str, entry: dict[str, Any]) -> float:
    """Score by the task that made the entry, between 0.0 and 1.0; partial credit is the task's own rule.

    entry: `question`, `answer` and `metadata`, which names its task in `source_dataset`.
    """
    return float(_scorer(entry["metadata"]["source_dataset"])(answer=completion, entry=entry))


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    # Making a scorer builds a data set object: up to 0.3 s for some tasks, so once per process.
    return get_score_answer_fn(task)  # type: ignore[no-any-return]
