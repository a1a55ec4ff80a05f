"""Rewards whose cost is what counts: work on one core, or a wait for a service elsewhere. Their scores are noise."""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib

from async_rlhf.actors.rewards import Score, reward


@reward
def work(completion: str, rounds: int) -> Score:
    """A stand-in for a frozen model: so many rounds of SHA-256, on one core and beside its memory. Reports its `seconds`."""
    began = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", completion.encode(), b"", rounds)
    return Score(_noise(completion), metrics={"seconds": time.perf_counter() - began})


@reward(max_concurrency=4096, timeout_s=60.0)
async def wait(completion: str, seconds: float) -> Score:
    """It takes time, and none of this machine's. Reports its `seconds`."""
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    return Score(_noise(completion), metrics={"seconds": time.perf_counter() - began})


def _noise(completion: str) -> float:
    """From 0 to 1, the same for the same text: rewards of a group differ, so that every step has something to learn from."""
    return zlib.crc32(completion.encode()) / 2**32
