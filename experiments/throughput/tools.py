"""Environments of the episodes benchmark: a conversation of a given number of turns, whose tools answer at once or sleep."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from async_rlhf.actors.environments import environment
from async_rlhf.buffers.score import Score
from async_rlhf.experiments.throughput import judges

# One character is one token of the model.
OBSERVATION = "abc "
MEAN_S = 0.5

_calls = itertools.count()


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


async def sleep() -> None:
    """What a call of a tool takes; the n-th call of a process sleeps as long in any loop."""
    await asyncio.sleep(seconds(next(_calls)))


def seconds(number: int) -> float:
    """Of call `number`: log-normal, mean `MEAN_S`, cut at twelve times that; a function of the number alone."""
    return MEAN_S / judges.MEAN_S * judges.sleep_seconds(number)
