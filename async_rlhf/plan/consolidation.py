"""Inter-stage fusion: the tail of generation is moved to few replicas, and scoring begins on the others.

RLHFuse (Zhong et al., arXiv 2409.13221, section 4): when no more than a threshold of rows is unfinished, the rows that are
left, with their key-value caches, go to the fewest replicas that hold them below the knee of a decode step; the devices of
the others score what is finished, and score the rest when it ends. No row is scored before it is complete, so that nothing
becomes stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Fused:
    """generated_s: when the last row ends; total_s: when the last row is scored; kept: replicas that made the tail."""

    generated_s: float
    total_s: float
    kept: int


def consolidated(
    lengths: Sequence[int],
    *,
    replicas: int,
    threshold: float,
    most_rows: int,
    step_s: Callable[[int, float], float],
    score_s: float,
    move_s: float = 0.0,
) -> Fused:
    """Rows in replicas of equal sets, all of them alive at once; a step makes one token of each.

    lengths: tokens of the completions. threshold: share of the rows; 0 gives generation, then scoring, one after the other.
    most_rows: that one kept replica takes. step_s(alive, produced): of a replica with so many rows, each with so many tokens.
    score_s: of all rows on all replicas; it grows with the tokens and falls with the replicas that do it. move_s: of a row's
    cache.
    """
    if replicas < 1 or most_rows < 1 or not 0 <= threshold <= 1 or not lengths:
        raise ConfigError(
            f"{len(lengths)} rows on {replicas} replicas, threshold = {threshold}, most_rows = {most_rows}: rows, replicas and "
            "most_rows 1 or more, the threshold a share of 0 to 1"
        )
    rows = sorted(lengths)
    tokens, total = sum(rows), len(rows)
    left = min(math.floor(threshold * total), total - 1)
    kept = min(math.ceil(left / most_rows), replicas - 1) if left else 0
    now, produced, at = 0.0, 0, 0
    moved_at, ended = math.inf, 0
    while at < total:
        alive, moved = total - at, bool(kept) and total - at <= left
        if moved and math.isinf(moved_at):
            now += move_s * math.ceil(alive / replicas)
            moved_at, ended = now, sum(rows[:at])
        stretch = rows[at] - produced
        now += stretch * step_s(math.ceil(alive / (kept if moved else replicas)), produced + stretch / 2)
        produced = rows[at]
        while at < total and rows[at] == produced:
            at += 1
    if math.isinf(moved_at):
        return Fused(generated_s=now, total_s=now + score_s, kept=replicas)
    # Finished rows are scored by the free replicas while the tail is made; what remains, by all of them.
    free_share = (replicas - kept) / replicas
    done = min(ended / tokens * score_s, (now - moved_at) * free_share)
    return Fused(generated_s=now, total_s=now + score_s - done, kept=kept)
