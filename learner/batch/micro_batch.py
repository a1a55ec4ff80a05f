"""Rows to the tensors of one forward pass: the one place that shifts by one, packs and masks.

Every completion attends to its prompt and to itself, never to its siblings. Everything the loss needs is flat over the N
loss-bearing tokens of a micro-batch, so padding never reaches it. A completion is never cut, and where a loss compares siblings
neither is a group. No gradient, no model here.

Axes: R rows, L positions of a row, N loss-bearing tokens, S completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import FULL, Reach
from async_rlhf.buffers.record import Float32Array, Rollout
from async_rlhf.learner.batch.rows import Member, Row
from async_rlhf.learner.batch.sampling_mask import SamplingMasks
from async_rlhf.learner.objective.estimation import TokenTargets


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass.

    ids_RL, positions_RL: int64. segments_RL: int64, 0 in the prompt, m in its m-th completion, -1 in padding.
    source_N: int64, index into the flattened [R L] of the position whose logits predict the token.
    target_N: int64 token ids. sequence_N: int64, ascending from 0. version_N: int64.
    logp_behaviour_N, advantage_N, temperature_N: float32. member_S: int64, which completion of the batch it is.
    group_S: int64, number of its group. What follows is float32 [N], None where the step has no use for it; at last the tokens
    that each was chosen among, as in `SamplingMasks`, None where nothing was cut off.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    segments_RL: Tensor
    source_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    version_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    temperature_N: Tensor
    member_S: Tensor
    group_S: Tensor
    mask_N: Tensor | None = None
    logp_proximal_N: Tensor | None = None
    logp_reference_N: Tensor | None = None
    value_N: Tensor | None = None
    return_N: Tensor | None = None
    mask_sizes_N: Tensor | None = None
    mask_ids_K: Tensor | None = None

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        if self.mask_sizes_N is None or self.mask_ids_K is None:
            return None
        return SamplingMasks(self.mask_sizes_N, self.mask_ids_K)

    @property
    def num_tokens(self) -> int:
        return len(self.target_N)

    @property
    def is_packed(self) -> bool:
        """Whether completions share a row."""
        return len(self.member_S) > len(self.ids_RL)

    @property
    def member_N(self) -> Tensor:
        """int64 [N]: which completion of the batch a token belongs to."""
        return self.member_S[self.sequence_N]

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """What there is of it, by name; `MicroBatch(**batch.tensors())` is the same batch."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class Packing:
    """How rows become micro-batches: at most `micro_batch_tokens` padded tokens each, one row at least.

    whole_groups: the rows of a group stay together, however many they are. sampling_masks: False evaluates the whole
    vocabulary, also where sampling was cut off. recorded_references: log-probabilities under the reference come from the
    rollouts, which all have them.
    """

    micro_batch_tokens: int
    whole_groups: bool = False
    sampling_masks: bool = True
    recorded_references: bool = False


def make_micro_batches(rows: Sequence[Row], packing: Packing) -> list[MicroBatch]:
    """Rows of similar length together."""
    units = (
        [list(same) for _, same in groupby(rows, key=lambda row: row.group)]
        if packing.whole_groups
        else [[row] for row in rows]
    )
    width = {id(unit): max(row.length for row in unit) for unit in units}
    batches: list[list[Row]] = []
    widest = 0
    for unit in sorted(units, key=lambda unit: width[id(unit)], reverse=True):
        if not batches or (len(batches[-1]) + len(unit)) * widest > packing.micro_batch_tokens:
            batches.append([])
            widest = width[id(unit)]
        batches[-1] += unit
    return [_tensors(batch, packing) for batch in batches]


def attention_mask(segments_RL: Tensor, positions_RL: Tensor, reach: Reach = FULL) -> Tensor:
    """bool [R, L, L], True where query (second axis) may attend to key (third): the prompt, and its own completion so far, as
    far back as a layer reaches. Distances are those of positions, for siblings stand between a completion and its prompt."""
    length = segments_RL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments_RL.device).tril()
    keys = segments_RL[:, None, :]
    seen = causal & ((segments_RL[:, :, None] == keys) | (keys == 0))
    query, key = positions_RL[:, :, None], positions_RL[:, None, :]
    if reach.window is not None:
        seen &= query - key < reach.window
    if reach.chunk is not None:
        seen &= query // reach.chunk == key // reach.chunk
    return seen


def _tensors(rows: Sequence[Row], packing: Packing) -> MicroBatch:
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), -1, np.int64)
    sources, temperatures = [], []
    members: list[Member] = []
    groups: list[int] = []
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
            groups.append(row.group)
            temperatures.append(row.sampling.temperature)
            start += read
    lengths = [member.rollout.num_tokens for member in members]
    sampling_masks = _sampling_masks([member.rollout for member in members]) if packing.sampling_masks else None
    return MicroBatch(
        ids_RL=torch.from_numpy(ids),
        positions_RL=torch.from_numpy(positions),
        segments_RL=torch.from_numpy(segments),
        source_N=torch.from_numpy(np.concatenate(sources)),
        target_N=torch.from_numpy(np.concatenate([m.rollout.completion_ids for m in members]).astype(np.int64)),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(members)), lengths)),
        version_N=torch.from_numpy(np.concatenate([m.rollout.versions for m in members]).astype(np.int64)),
        logp_behaviour_N=torch.from_numpy(np.concatenate([m.rollout.logprobs for m in members]).astype(np.float32)),
        advantage_N=torch.from_numpy(np.concatenate([m.advantages for m in members])),
        temperature_N=torch.from_numpy(np.repeat(temperatures, lengths).astype(np.float32)),
        member_S=torch.tensor([member.index for member in members]),
        group_S=torch.tensor(groups),
        mask_N=_optional(members, lambda targets: targets.mask),
        logp_proximal_N=_optional(members, lambda targets: targets.observed.logp_proximal),
        logp_reference_N=_recorded(members)
        if packing.recorded_references
        else _optional(members, lambda targets: targets.observed.logp_reference),
        value_N=_optional(members, lambda targets: targets.observed.value),
        return_N=_optional(members, lambda targets: targets.returns),
        mask_sizes_N=None if sampling_masks is None else sampling_masks.sizes_N,
        mask_ids_K=None if sampling_masks is None else sampling_masks.ids_K,
    )


def _sampling_masks(rollouts: Sequence[Rollout]) -> SamplingMasks | None:
    """None where nothing was cut off from any of them."""
    kept = [rollout.sampling_mask for rollout in rollouts]
    if all(sampling_mask is None for sampling_mask in kept):
        return None
    nothing = np.empty(0, np.int32)
    sizes = [np.zeros(r.num_tokens, np.int32) if s is None else s.sizes for r, s in zip(rollouts, kept, strict=True)]
    ids = np.concatenate([nothing if sampling_mask is None else sampling_mask.ids for sampling_mask in kept])
    return SamplingMasks(torch.from_numpy(np.concatenate(sizes).astype(np.int64)), torch.from_numpy(ids.astype(np.int64)))


def _recorded(members: Sequence[Member]) -> Tensor:
    """float32 [N]: log-probabilities under the reference, as an actor's stage computed them."""
    return torch.from_numpy(np.concatenate([m.rollout.reference for m in members if m.rollout.reference is not None]))


def _optional(members: Sequence[Member], of: Callable[[TokenTargets], Float32Array | None]) -> Tensor | None:
    """float32 [N] of what all members have, else None."""
    found = [None if member.targets is None else of(member.targets) for member in members]
    if any(each is None for each in found):
        return None
    return torch.from_numpy(np.concatenate([each for each in found if each is not None]).astype(np.float32))
