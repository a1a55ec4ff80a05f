"""A judge that is waited for: its score is not counted, its time is."""

import asyncio
from random import Random

from async_rlhf import reward


@reward(max_concurrency=1024)
async def wait(completion: str, answer: str, median_s: float, sigma: float) -> float:
    """Sleeps a time drawn from a log-normal distribution, the same for the same completion of the same word."""
    if median_s > 0:
        await asyncio.sleep(median_s * Random(f"{answer} {completion}").lognormvariate(0.0, sigma))
    return 0.0
