"""A block of schedules in one go: what a worker process of the command does."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from tests.simulation import schedule

_BLOCK = 100


def run_block(seeds: tuple[int, int]) -> tuple[int, int, str, int | None]:
    """(schedules, events, digest of all traces, first failing seed) of a block of seeds."""
    digest, events = xxhash.xxh3_128(), 0
    for seed in range(*seeds):
        result = schedule.run(seed)
        events += len(result.trace)
        digest.update(result.digest.encode())
        if result.violation is not None:
            return seed + 1 - seeds[0], events, digest.hexdigest(), seed
    return seeds[1] - seeds[0], events, digest.hexdigest(), None


def blocks(first: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(first, end, _BLOCK):
        yield start, min(start + _BLOCK, end)
