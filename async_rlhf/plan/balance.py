"""What the most loaded of several ranks gets when rows of unequal cost are shared out."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace

from async_rlhf.buffers.errors import ConfigError


def most_loaded(costs: Iterable[float], ranks: int) -> float:
    """Each row, the most expensive first, goes to the rank with the least so far; the sum of the rank with the most.

    At most 4/3 of what the best way to share gives (Graham, Bounds on multiprocessing timing anomalies, 1969), and never less
    than the most expensive row: a long completion keeps all other ranks waiting.
    """
    if ranks < 1:
        raise ConfigError(f"ranks = {ranks}: at least 1")
    loads = [0.0] * ranks
    heapify(loads)
    for cost in sorted(costs, reverse=True):
        heapreplace(loads, loads[0] + cost)
    return max(loads)
