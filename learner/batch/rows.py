"""Groups to rows: a prompt with the completions of it to learn from. No tensors here.

How many of them share the prompt's computation is decided when rows become micro-batches (`packing`). Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.record import Float32Array, Group, Rollout
from async_rlhf.buffers.routing import Routing, misfit
from async_rlhf.learner.objective.estimation import TokenTargets


@dataclass(frozen=True)
class RowMember:
    """One completion to learn from: its rollout, its advantage, its index in the batch, and its targets by token."""

    rollout: Rollout
    advantage: float
    index: int
    targets: TokenTargets | None = None

    @property
    def advantages(self) -> Float32Array:
        """float32 [N], of sampled tokens."""
        if self.targets is not None and self.targets.advantage is not None:
            return self.targets.advantage.astype(np.float32)
        return np.full(self.rollout.num_tokens, self.advantage, np.float32)


@dataclass(frozen=True)
class BatchRow:
    """The prompt of a group with some of its completions. The last token of a completion's piece is predicted, never read."""

    group: Group
    members: tuple[RowMember, ...]

    @property
    def length(self) -> int:
        return len(self.group.prompt_ids) + sum(member.rollout.num_read for member in self.members)

    @property
    def images(self) -> set[tuple[str, ...]]:
        """Those of the prompt together, and those that a piece begins with."""
        return {self.group.images, *(images for member in self.members for images in member.rollout.images)} - {()}

    @property
    def lengths(self) -> list[int]:
        """Lengths of the prompt with the first piece of its only completion, and of each further piece."""
        (member,) = self.members
        first, *others = [piece.num_read for piece in member.rollout.pieces]
        return [len(self.group.prompt_ids) + first, *others]


def make_rows(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
    targets: Mapping[int, TokenTargets] | None = None,
) -> list[BatchRow]:
    """A row of each group that has something to learn from. A None advantage leaves the completion out.

    `advantages[g][m]` belongs to member m of group g; members are numbered over the whole batch, and `targets` are by
    that number.
    """
    targets = targets or {}
    rows: list[BatchRow] = []
    index = 0
    for group, values in zip(groups, advantages, strict=True):
        members: list[RowMember] = []
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            if advantage is not None:
                members.append(RowMember(rollout, advantage, index, targets.get(index)))
            index += 1
        if members:
            rows.append(BatchRow(group, tuple(members)))
    return rows


def by_group(rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """Rows by group; the rows of a group follow each other."""
    return [list(same) for _, same in groupby(rows, key=lambda row: row.group.number)]


def split_updates(rows: Sequence[BatchRow], num_updates: int) -> list[list[BatchRow]]:
    """Rows cut, in order, into at most `num_updates` updates of equally many whole groups (the last may have fewer)."""
    groups = by_group(rows)
    size = -(-len(groups) // num_updates)
    return [[row for group in groups[i : i + size] for row in group] for i in range(0, len(groups), max(1, size))]


def check_row(row: BatchRow, vocabulary: int, routing: Routing | None, *, sampling_masks: bool, references: bool) -> None:
    """Raises RecordError for a token that the model does not have (on some devices the model itself would not name it); with
    `sampling_masks`, when it is not known what a token of a truncated distribution was chosen among; with `references`, when
    log-probabilities under the reference should have been recorded and were not; and for recorded experts that are not those of
    `routing`, which the learner can replay."""
    number, truncation = row.group.number, row.group.sampling.truncation
    rollouts = [member.rollout for member in row.members]
    ids = [row.group.prompt_ids, *(rollout.completion_ids for rollout in rollouts)]
    ids += [rollout.sampling_mask.ids for rollout in rollouts if rollout.sampling_mask is not None]
    if (largest := max(int(each.max(initial=0)) for each in ids)) >= vocabulary:
        raise RecordError(
            f"group {number} has token {largest}, the model has those from 0 to {vocabulary - 1}. "
            "Its actor serves another model or tokenizer than the learner's"
        )
    if sampling_masks and truncation and any(rollout.sampling_mask is None for rollout in rollouts):
        raise RecordError(
            f"group {number} was sampled with {truncation}, and its engine did not record what was left: "
            "a ratio to that distribution is not known. Sample from all of it, or set loss.allow_uncorrected = true"
        )
    if references and any(rollout.reference is None for rollout in rollouts):
        raise RecordError(
            f"group {number} carries no log-probabilities under the reference. Its actor had no such stage: set "
            'scoring.stages.reference.placement = "learner", which computes them here'
        )
    if problem := next(filter(None, (misfit(routing, each.routing) for each in rollouts if each.routing is not None)), None):
        raise RecordError(
            f"group {number} was recorded with {problem}, which this learner does not replay: use the model and the settings "
            "that it was made with (engine.replay_routing)"
        )
