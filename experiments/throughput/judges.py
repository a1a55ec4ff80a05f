"""The judges of the pipeline benchmark, for both sides. Standard library only: TRL's interpreter has no more."""

from __future__ import annotations

import asyncio
import itertools
import math
import random

# A remote judge: mostly quick, sometimes slow. The mean is of the distribution before the cut.
MEAN_S, SIGMA, LONGEST_S = 0.25, 1.0, 3.0
BATCH_SIZE = 128

_calls = itertools.count()


def similarity(completion: str, answer: str) -> float:
    """Share of the answer's places that hold the right character."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(1, len(answer))


async def slow_similarity(completion: str, answer: str) -> float:
    """`similarity` after a sleep. The n-th call of a process sleeps as long in either system."""
    await asyncio.sleep(sleep_seconds(next(_calls)))
    return similarity(completion, answer)


def sleep_seconds(number: int) -> float:
    """Seconds that completion `number` waits for its judge: log-normal, cut at LONGEST_S; a function of the number alone."""
    mu = math.log(MEAN_S) - SIGMA**2 / 2  # so that the mean of the log-normal is MEAN_S
    return min(LONGEST_S, random.Random(number).lognormvariate(mu, SIGMA))
