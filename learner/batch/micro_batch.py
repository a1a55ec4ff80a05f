"""Rows to the tensors of one forward pass: the one place that shifts by one, packs and masks.

Every completion attends to its prompt and to itself, never to its siblings. Everything the loss needs is flat over the N
loss-bearing tokens of a micro-batch, so padding never reaches it. A completion is never cut, and where a loss compares siblings
neither is a group. No gradient, no model here.

Axes: R rows, L positions of a row, N loss-bearing tokens (those that were sampled; what an environment gave is only read), S
completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import FULL, Reach
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.learner.batch.rows import Member, Row, by_group
from async_rlhf.learner.batch.sampling_mask import SamplingMasks


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy reads in one forward pass, and the tokens whose log-probabilities are asked of it.

    ids_RL, positions_RL: int64. segments_RL: int64, 0 in the prompt, m in its m-th completion, -1 in padding.
    source_N: int64, index into the flattened [R L] of the position whose logits predict the token. target_N: int64 token ids.
    temperature_N: float32. sampling_masks: the tokens that each was chosen among; None where nothing was cut off.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    segments_RL: Tensor
    source_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    sampling_masks: SamplingMasks | None

    @property
    def num_tokens(self) -> int:
        return len(self.target_N)


@dataclass(frozen=True)
class MicroBatch(PolicyInputs):
    """Tensors of one forward pass and of its loss.

    member_N: int64, which completion of the batch a token belongs to; a completion's tokens follow each other. group_S: int64,
    number of a completion's group. version_N: int64. logp_behaviour_N, advantage_N: float32. What follows is float32 [N], as in
    `TokenTargets`, None where the step has no use for it.
    """

    member_N: Tensor
    group_S: Tensor
    version_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    mask_N: Tensor | None = None
    logp_proximal_N: Tensor | None = None
    logp_reference_N: Tensor | None = None
    value_N: Tensor | None = None
    return_N: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether completions share a row."""
        return len(self.group_S) > len(self.ids_RL)

    @property
    def sequence_N(self) -> Tensor:
        """int64 [N]: which completion of the micro-batch a token belongs to, ascending from 0."""
        number_N: Tensor = self.member_N.unique_consecutive(return_inverse=True)[1]  # type: ignore[no-untyped-call]
        return number_N

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch.of({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """What there is of it, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        masks = named.pop("sampling_masks")
        return {name: tensor for name, tensor in named.items() if tensor is not None} | (masks._asdict() if masks else {})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MicroBatch:
        """The batch with these `tensors()`."""
        named = dict(tensors)
        masks = [named.pop(name) for name in SamplingMasks._fields if name in named]
        return cls(**named, sampling_masks=SamplingMasks(*masks) if masks else None)


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
    """Rows of similar length together, and apart those of one completion, which need no mask and may be far longer."""
    units = by_group(rows) if packing.whole_groups else [[row] for row in rows]
    # whether completions share a row, and the length of the longest
    kind = {id(unit): (any(len(row.members) > 1 for row in unit), max(row.length for row in unit)) for unit in units}
    batches: list[list[Row]] = []
    packed, widest = False, 0
    for unit in sorted(units, key=lambda unit: kind[id(unit)], reverse=True):
        full = not batches or (len(batches[-1]) + len(unit)) * widest > packing.micro_batch_tokens
        if full or packed != kind[id(unit)][0]:
            batches.append([])
            packed, widest = kind[id(unit)]
        batches[-1] += unit
    return [_tensors(batch, packing) for batch in batches]


def attention_mask(segments_RL: Tensor, positions_RL: Tensor, reach: Reach = FULL) -> Tensor:
    """bool [R, L, L], True where query (second axis) may attend to key (third): the prompt, and its own completion so far, as
    far back as a layer reaches. Distances are those of positions, for siblings stand between a completion and its prompt."""
    length = segments_RL.shape[1]
    keys = segments_RL[:, None, :]
    seen = segments_RL[:, :, None] == keys
    seen |= keys == 0
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments_RL.device).tril()
    if reach.window is not None:
        seen &= positions_RL[:, :, None] < (positions_RL + reach.window)[:, None, :]
    if reach.chunk is not None:
        chunk_RL = positions_RL // reach.chunk
        seen &= chunk_RL[:, :, None] == chunk_RL[:, None, :]
    return seen


def attention_bias(segments_RL: Tensor, positions_RL: Tensor, reach: Reach, dtype: torch.dtype) -> Tensor:
    """[R, 1, L, L] in `dtype`, added to the products of queries and keys: 0 where `attention_mask` is True, else the lowest
    number. In `dtype` they are computed in, and in lines of a multiple of 8 numbers, so that no layer makes a copy of it."""
    rows, length = segments_RL.shape
    lines = torch.full((rows, length, -(-length // 8) * 8), torch.finfo(dtype).min, dtype=dtype, device=segments_RL.device)
    return lines[..., :length].masked_fill_(attention_mask(segments_RL, positions_RL, reach), 0)[:, None]


def _tensors(rows: Sequence[Row], packing: Packing) -> MicroBatch:
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), -1, np.int64)
    sources: list[np.ndarray] = []
    members: list[Member] = []
    groups: list[Group] = []
    for r, row in enumerate(rows):
        prompt = len(row.group.prompt_ids)
        ids[r, :prompt] = row.group.prompt_ids
        positions[r, :prompt] = np.arange(prompt)
        segments[r, :prompt] = 0
        start = prompt
        for m, member in enumerate(row.members, 1):
            read = member.rollout.length - 1
            ids[r, start : start + read] = member.rollout.completion_ids[:-1]
            positions[r, start : start + read] = np.arange(prompt, prompt + read)
            segments[r, start : start + read] = m
            # the first token is predicted by the prompt's last position, each other by the token before it
            predicting = np.concatenate([[prompt - 1], np.arange(start, start + read)])
            sources.append(r * width + predicting[member.rollout.sampled])
            members.append(member)
            groups.append(row.group)
            start += read
    rollouts = [member.rollout for member in members]
    lengths = [rollout.num_tokens for rollout in rollouts]
    targets = _targets(members)
    if packing.recorded_references:
        targets["logp_reference_N"] = _joined([r.reference for r in rollouts if r.reference is not None], np.float32)
    return MicroBatch(
        ids_RL=torch.from_numpy(ids),
        positions_RL=torch.from_numpy(positions),
        segments_RL=torch.from_numpy(segments),
        source_N=_joined(sources, np.int64),
        target_N=_joined([rollout.sampled_ids for rollout in rollouts], np.int64),
        temperature_N=torch.from_numpy(np.repeat([group.sampling.temperature for group in groups], lengths).astype(np.float32)),
        sampling_masks=_sampling_masks(rollouts) if packing.sampling_masks else None,
        member_N=torch.from_numpy(np.repeat([member.index for member in members], lengths)),
        group_S=torch.tensor([group.number for group in groups]),
        version_N=_joined([rollout.versions for rollout in rollouts], np.int64),
        logp_behaviour_N=_joined([rollout.logprobs for rollout in rollouts], np.float32),
        advantage_N=_joined([member.advantages for member in members], np.float32),
        **targets,
    )


def _sampling_masks(rollouts: Sequence[Rollout]) -> SamplingMasks | None:
    """None where nothing was cut off from any of them."""
    kept = [rollout.sampling_mask for rollout in rollouts]
    if all(sampling_mask is None for sampling_mask in kept):
        return None
    sizes = [np.zeros(r.num_tokens, np.int32) if s is None else s.sizes for r, s in zip(rollouts, kept, strict=True)]
    return SamplingMasks(_joined(sizes, np.int64), _joined([each.ids for each in kept if each is not None], np.int64))


def _targets(members: Sequence[Member]) -> dict[str, Tensor]:
    """float32 [N] by name: what all members have."""
    each = [{} if member.targets is None else member.targets.named() for member in members]
    return {name: _joined([own[name] for own in each], np.float32) for name in each[0] if all(name in own for own in each)}


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.int64 | np.float32]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))
