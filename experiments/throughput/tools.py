"""Environments of the episodes benchmark: a conversation of a given number of turns, whose tools answer at once or sleep."""

from __future__ import annotations

from collections.abc import AsyncIterator

from async_rlhf.actors.environments import environment
from async_rlhf.buffers.score import Score
from async_rlhf.experiments.throughput.slow_tool import OBSERVATION, sleep


@environment(max_turns=100)
async def instant(prompt: str, turns: int) -> AsyncIterator[str | Score]:
    """Its tools answer at once."""
    yield prompt
    for _ in range(turns - 1):
        yield OBSERVATION
    yield Score(1.0)


@environment(max_turns=100)
async def slow(prompt: str, turns: int) -> AsyncIterator[str | Score]:
    """Before each observation a sleep."""
    yield prompt
    for _ in range(turns - 1):
        await sleep()
        yield OBSERVATION
    yield Score(1.0)
