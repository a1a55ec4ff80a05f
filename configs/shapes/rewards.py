"""The reward of the run with drawings: half a point for the colour, half for the shape."""

from __future__ import annotations

from async_rlhf.actors.rewards import reward


@reward
def named(completion: str, answer: str) -> float:
    """1 for both words and nothing else, 0.5 for one of them in its place."""
    said, right = completion.split(), answer.split()
    return sum(one == other for one, other in zip(said, right, strict=False)) / 2 if len(said) == 2 else 0.0
