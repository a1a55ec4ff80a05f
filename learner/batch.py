"""Groups to tensors: the one place that shifts by one, packs and masks.

A row holds one prompt and several of its completions: the prompt is computed once and every completion attends to it
and to itself, never to its siblings. Everything the loss needs is flat over the N loss-bearing tokens of a micro-batch,
so padding never reaches it. Called by the trainer; no gradient, no model here.

Axes: R rows, L positions of a row, N loss-bearing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from buffers.record import Group, Int32Array, Rollout


@dataclass(frozen=True)
class Member:
    """One completion to learn from: its rollout, its advantage, and its index in the batch."""

    rollout: Rollout
    advantage: float
    index: int


@dataclass(frozen=True)
class Row:
    """The prompt of group `group` with some of its completions. A completion's last token is predicted, never read."""

    group: int
    prompt_ids: Int32Array
    temperature: float
    members: tuple[Member, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(member.rollout.num_tokens - 1 for member in self.members)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass.

    ids_RL, positions_RL: int64. mask_RLL: bool, True where query (second axis) may attend to key (third).
    source_N: int64, index into the flattened [R L] of the position whose logits predict the token.
    target_N: int64 token ids. member_N: int64, which completion of the batch a token belongs to.
    logp_behaviour_N, advantage_N, temperature_N: float32. version_N: int64.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    mask_RLL: Tensor
    source_N: Tensor
    target_N: Tensor
    member_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    temperature_N: Tensor
    version_N: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def make_rows(groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], row_tokens: int) -> list[Row]:
    """Rows of at most `row_tokens` (one completion at least). A None advantage leaves the completion out.

    `advantages[g][m]` belongs to member m of group g; members are numbered over the whole batch.
    """
    rows: list[Row] = []
    index = 0
    for group, values in zip(groups, advantages, strict=True):
        members: list[Member] = []
        length = len(group.prompt_ids)
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            if advantage is not None:
                if members and length + rollout.num_tokens - 1 > row_tokens:
                    rows.append(Row(group.number, group.prompt_ids, group.temperature, tuple(members)))
                    members, length = [], len(group.prompt_ids)
                members.append(Member(rollout, advantage, index))
                length += rollout.num_tokens - 1
            index += 1
        if members:
            rows.append(Row(group.number, group.prompt_ids, group.temperature, tuple(members)))
    return rows


def deal(rows: Sequence[Row], num_updates: int) -> list[list[Row]]:
    """Rows cut, in order, into at most `num_updates` updates of equally many whole groups (the last may have fewer)."""
    groups = [list(same) for _, same in groupby(rows, key=lambda row: row.group)]
    size = -(-len(groups) // num_updates)
    return [[row for group in groups[i : i + size] for row in group] for i in range(0, len(groups), max(1, size))]


def make_micro_batches(rows: Sequence[Row], micro_batch_tokens: int) -> list[MicroBatch]:
    """Rows of similar length together, at most `micro_batch_tokens` padded tokens each (one row at least)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].length > micro_batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return [_tensors(batch) for batch in batches]


def _tensors(rows: Sequence[Row]) -> MicroBatch:
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    # 0 is the prompt, which all may read; m >= 1 is a completion, which only itself may read; -1 is padding
    segments = np.full((len(rows), width), -1, np.int64)
    sources, members, temperatures = [], [], []
    for r, row in enumerate(rows):
        prompt = len(row.prompt_ids)
        ids[r, :prompt] = row.prompt_ids
        positions[r, :prompt] = np.arange(prompt)
        segments[r, :prompt] = 0
        start = prompt
        for m, member in enumerate(row.members, 1):
            read = member.rollout.num_tokens - 1
            ids[r, start : start + read] = member.rollout.completion_ids[:-1]
            positions[r, start : start + read] = np.arange(prompt, prompt + read)
            segments[r, start : start + read] = m
            # the first token is predicted by the prompt's last position, each other by the token before it
            sources.append(r * width + np.concatenate([[prompt - 1], np.arange(start, start + read)]))
            members.append(member)
            temperatures.append(row.temperature)
            start += read
    lengths = [member.rollout.num_tokens for member in members]
    causal = np.tri(width, dtype=bool)
    same = segments[:, :, None] == segments[:, None, :]
    mask = causal & (same | (segments[:, None, :] == 0))
    return MicroBatch(
        ids_RL=torch.from_numpy(ids),
        positions_RL=torch.from_numpy(positions),
        mask_RLL=torch.from_numpy(mask),
        source_N=torch.from_numpy(np.concatenate(sources)),
        target_N=torch.from_numpy(np.concatenate([m.rollout.completion_ids for m in members]).astype(np.int64)),
        member_N=torch.from_numpy(np.repeat([m.index for m in members], lengths)),
        logp_behaviour_N=torch.from_numpy(np.concatenate([m.rollout.logprobs for m in members]).astype(np.float32)),
        advantage_N=torch.from_numpy(np.repeat([m.advantage for m in members], lengths).astype(np.float32)),
        temperature_N=torch.from_numpy(np.repeat(temperatures, lengths).astype(np.float32)),
        version_N=torch.from_numpy(np.concatenate([m.rollout.versions for m in members]).astype(np.int64)),
    )
