"""Which members of a group a loss learns from, and which groups say anything at all. A member left out is None."""

from __future__ import annotations

from collections.abc import Sequence

from async_rlhf.buffers.composition import EPSILON

Rewards = Sequence[float | None]


def constant(rewards: Rewards) -> bool:
    """Whether all members that count have the same reward (also when fewer than two count)."""
    counting = [reward for reward in rewards if reward is not None]
    return len(counting) < 2 or max(counting) - min(counting) < EPSILON


def pair(rewards: Rewards) -> list[float | None]:
    """The best member and the worst keep their reward; the first of equals. Nobody, in a constant group."""
    if constant(rewards):
        return [None for _ in rewards]
    counting = [(reward, m) for m, reward in enumerate(rewards) if reward is not None]
    best_one = max(counting, key=lambda each: (each[0], -each[1]))[1]
    worst_one = min(counting)[1]
    return [reward if m in {best_one, worst_one} else None for m, reward in enumerate(rewards)]


def best(rewards: Rewards) -> list[float | None]:
    """The best member keeps its reward; the first of equals. Nobody, in a constant group: none of it is better."""
    if constant(rewards):
        return [None for _ in rewards]
    first = max((reward, -m) for m, reward in enumerate(rewards) if reward is not None)
    return [reward if m == -first[1] else None for m, reward in enumerate(rewards)]


def drop_constant(groups: Sequence[Rewards]) -> list[list[float | None]]:
    """Constant groups lose all their members: they would add tokens to a denominator and nothing to a numerator.

    The filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2). Its refill is the queue's: constant
    groups are replaced when they are put (`buffers/queue/bound.py`), and what still comes here makes the batch smaller.
    """
    return [[None for _ in rewards] if constant(rewards) else list(rewards) for rewards in groups]
