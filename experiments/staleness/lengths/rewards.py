"""A judge that takes longer for longer completions."""

import asyncio

from async_rlhf import reward
from async_rlhf.experiments.throughput.judges import similarity


@reward(max_concurrency=1024)
async def reading(completion: str, answer: str) -> float:
    """Share of the answer's letters in their place, after 10 ms times the square of the completion's length: up to 2.6 s."""
    await asyncio.sleep(0.01 * len(completion) ** 2)
    return similarity(completion, answer)
