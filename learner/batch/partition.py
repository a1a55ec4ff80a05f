"""Micro-batch partition: an update's rows over the ranks, with the counts of the whole update.

Pure. Rows go to the rank with the least to do, longest first; every rank gets equally many micro-batches, padding batches
where it has fewer, since ranks that share parameters must make every pass together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from async_rlhf.learner.batch.micro_batch import MicroBatch, Packing, make_micro_batches
from async_rlhf.learner.batch.rows import Row, by_group
from async_rlhf.learner.objective.loss import Counts


@dataclass(frozen=True)
class Update:
    """One rank's part of one optimizer update. `counts` are those of the whole update."""

    batches: tuple[MicroBatch, ...]
    counts: Counts
    number: int
    """Updates of the same rows have the same number: what was computed of the first serves the others."""


def partition(updates: Sequence[Sequence[Row]], ranks: int, packing: Packing) -> list[list[Update]]:
    """For every rank its part of every update."""
    parts: list[list[Update]] = [[] for _ in range(ranks)]
    numbers: dict[int, int] = {}
    for rows in updates:
        counts = count(rows)
        number = numbers.setdefault(id(rows), len(numbers))
        cut = [make_micro_batches(mine, packing) for mine in partition_rows(rows, ranks)]
        most = max(len(batches) for batches in cut)
        for part, batches in zip(parts, cut, strict=True):
            padding = [padding_batch() for _ in range(most - len(batches))]
            part.append(Update((*batches, *padding), counts, number))
    return parts


def count(rows: Sequence[Row]) -> Counts:
    lengths = [member.rollout.num_tokens for row in rows for member in row.members]
    return Counts(num_tokens=sum(lengths), num_sequences=len(lengths), num_groups=len({row.group.number for row in rows}))


def partition_rows(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """The rows of each rank: whole groups, longest first, each to the rank with the fewest tokens so far; order kept."""
    if ranks == 1:
        return [list(rows)]
    groups = by_group(rows)
    tokens = [sum(row.length for row in group) for group in groups]
    load, owner = [0] * ranks, [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda index: -tokens[index]):
        owner[index] = min(range(ranks), key=load.__getitem__)
        load[owner[index]] += tokens[index]
    return [[row for index, group in enumerate(groups) if owner[index] == rank for row in group] for rank in range(ranks)]


def padding_batch() -> MicroBatch:
    """A forward pass with nothing to learn from: one position, no token."""
    position, nothing, zero = torch.zeros(1, 1, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0)
    return MicroBatch(
        **dict.fromkeys(("ids_RL", "positions_RL", "segments_RL"), position),
        **dict.fromkeys(("source_N", "target_N", "member_N", "group_S", "version_N"), nothing),
        **dict.fromkeys(("temperature_N", "logp_behaviour_N", "advantage_N"), zero),
        comparable_N=nothing.bool(),
        sampling_masks=None,
    )
