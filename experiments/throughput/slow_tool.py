"""The tool that sleeps, in the loops of the episodes benchmark. Standard library only: TRL's interpreter has no more."""

from __future__ import annotations

import asyncio
import itertools

from async_rlhf.experiments.throughput import judges

# One character is one token of the model.
OBSERVATION = "abc "
MEAN_S = 0.5

_calls = itertools.count()


async def sleep(mean_s: float | None = None) -> None:
    """What a call of the tool takes; the n-th call of a process sleeps as long in any loop."""
    await asyncio.sleep(seconds(next(_calls), MEAN_S if mean_s is None else mean_s))


def seconds(number: int, mean_s: float) -> float:
    """Of call `number`: log-normal, mean `mean_s`, cut at twelve times that; a function of the number and the mean."""
    return mean_s / judges.MEAN_S * judges.sleep_seconds(number)
