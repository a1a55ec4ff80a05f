"""The answer, word for word."""

from __future__ import annotations

from async_rlhf.actors.rewards.settings import reward


@reward
def exact(completion: str, answer: str) -> float:
    """1.0 when the completion is the answer, surrounding white space aside; else 0.0."""
    return float(completion.strip() == answer.strip())
