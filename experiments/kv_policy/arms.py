"""The policies that are compared, each with the same number of kept tokens.

Half of what is not a sink is the window, half representatives; the window alone has all of it. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rlhf.actors.config import EngineConfig, KVConfig
from async_rlhf.actors.torch_engine.kv_policy import Bools, KVPolicy

SINKS = 4
FULL = "full"
ARMS = {
    "window": "sinks and window (StreamingLLM)",
    "interval": "first token of every so many",
    "last": "last token of each chunk (SepLLM)",
    "first": "first token of each chunk (Chunk Sink)",
}
"""By name: what is kept beside sinks and window."""


def settings(arm: str, budget: int, ends: Sequence[str], interval: int) -> dict[str, object]:
    """Of `EngineConfig`. interval: tokens of a chunk where nothing else ends one, which elsewhere no chunk reaches."""
    if arm == FULL:
        return {"kv_policy": "full"}
    if arm == "window":
        return {"kv_policy": "window", "kv": {"sinks": SINKS, "window": budget - SINKS}}
    representatives = (budget - SINKS) // 2
    kept = {"sinks": SINKS, "window": budget - SINKS - representatives, "representatives": representatives}
    if arm == "interval":
        return {"kv_policy": "chunk_sink", "kv": {**kept, "chunk": interval, "ends": []}}
    return {"kv_policy": "chunk_sink", "kv": {**kept, "chunk": 4 * interval, "ends": list(ends), "representative": arm}}


def policy(arm: str, budget: int, ends: Bools, interval: int) -> KVPolicy:
    """The same, of a model whose tokens end chunks as bool [V] says."""
    config = EngineConfig.model_validate(settings(arm, budget, (".",), interval))
    kv: KVConfig = config.kv
    representatives = kv.representatives if config.kv_policy == "chunk_sink" else 0
    nothing = np.zeros_like(ends)
    return KVPolicy(
        kv.sinks, kv.window, representatives, kv.chunk, kv.representative, nothing if arm in ("window", "interval") else ends
    )


def usual_chunk(ids: Sequence[int], ends: Bools) -> int:
    """Tokens of a chunk on average, so that a fixed interval is as long."""
    return max(2, round(len(ids) / max(1, int(ends[np.array(ids)].sum()))))
