"""An update's rows over the ranks, and to the tensors of one forward pass: the one place that shifts by one, packs and masks.

Every completion attends to its prompt and to itself, never to its siblings; a piece that begins a row anew attends to itself
alone. Completions that share a row stand in it with all of their pieces; of one that has a row of its own each further piece
has one too. Everything the loss needs is flat over the N loss-bearing tokens of a micro-batch, so padding never reaches it. A
completion is never cut over micro-batches, and where a loss compares siblings neither is a group. No gradient, no model here.

Rows go to the rank with the least to do, longest first; every rank gets equally many micro-batches, padding batches where it
has fewer, since ranks that share parameters must make every pass together.

Axes: R rows, L positions of a row, N loss-bearing tokens (those that were sampled; what an environment gave is only read), S
completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import FULL, Reach
from async_rlhf.buffers.record import Rollout
from async_rlhf.learner.batch.rows import Member, Row, by_group
from async_rlhf.learner.objective.objective import Counts


class SamplingMasks(NamedTuple):
    """The tokens that each token was chosen among. sizes_N: int64, how many, 0 where nothing was cut off. ids_K: int64, one
    mask after the other.

    Where sampling was cut off (top-k, top-p, ...), a token comes from b_S(a) = b(a) / b(S), with S the tokens that were left.
    Every policy of the learner (current, proximal, reference) is then evaluated as p_S(a) = p(a) / p(S) on the *recorded* S,
    so that an unchanged policy has ratio 1; p / b_S would be b(S) there. A token outside S is never sampled, so no weight can
    stand for it, and what is estimated is not the gradient of p:

        sum over a in S of b_S(a) (p_S(a) / b_S(a)) A(a) grad log p_S(a) = grad E_{p_S}[A]

    is the policy gradient of the masked policy. S is fixed by the prefix, so p_S is a policy like any other (Huang & Ontanon
    2020, "A closer look at invalid action masking", arXiv 2006.14171); masks recorded from truncated sampling are those of
    DeepSeek-V3.2 (2025, arXiv 2512.02556, section 3.1, "keep sampling mask"). Logits outside S get no gradient, and divergence
    and entropy are those of p_S: what the policy does outside is neither seen nor held.
    """

    sizes_N: Tensor
    ids_K: Tensor

    def chunks(self, rows: int) -> list[SamplingMasks]:
        """Those of `rows` tokens at a time."""
        sizes = torch.split(self.sizes_N, rows)
        ids = torch.split(self.ids_K, [int(each.sum()) for each in sizes])
        return [SamplingMasks(*pair) for pair in zip(sizes, ids, strict=True)]

    def of(self, index_M: Tensor) -> SamplingMasks:
        """Those of some tokens, by ascending index."""
        chosen_N = torch.zeros_like(self.sizes_N, dtype=torch.bool).index_fill(0, index_M, True)
        return SamplingMasks(self.sizes_N[index_M], self.ids_K[torch.repeat_interleave(chosen_N, self.sizes_N)])

    def restrict_(self, logits_NV: Tensor) -> Tensor:
        """The same logits, -inf outside each sampling mask; in place, and differentiable. IndexError for an unknown id."""
        index = torch.repeat_interleave(self.sizes_N), self.ids_K
        kept_K = logits_NV[index]
        return logits_NV.masked_fill_((self.sizes_N > 0)[:, None], -torch.inf).index_put_(index, kept_K)


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What a policy reads in one forward pass, and the tokens whose log-probabilities are asked of it.

    ids_RL, positions_RL: int64. segments_RL: int64, 0 in the prompt, m > 0 in what its m-th completion has behind it; -1 in
    padding, and -2, -3, ... in pieces that begin anew.
    source_N: int64, index into the flattened [R L] of the position whose logits predict the token. target_N: int64 token ids.
    temperature_N: float32. sizes_N, ids_K: the tokens that each was chosen among, as in `SamplingMasks`; None where nothing was
    cut off.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    segments_RL: Tensor
    source_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    sizes_N: Tensor | None = None
    ids_K: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.target_N)

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        return None if self.sizes_N is None or self.ids_K is None else SamplingMasks(self.sizes_N, self.ids_K)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(PolicyInputs):
    """Tensors of one forward pass and of its loss.

    member_N: int64, which completion of the batch a token belongs to; a completion's tokens follow each other. group_S: int64,
    number of a completion's group. version_N: int64. comparable_N: bool, whether what a token was sampled from follows from the
    weights `version_N` and its row alone. logp_behaviour_N, advantage_N: float32. What follows is float32 [N], as in
    `TokenTargets`, None where the step has no use for it.
    """

    member_N: Tensor
    group_S: Tensor
    version_N: Tensor
    comparable_N: Tensor
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
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MicroBatch:
        """The batch with these `tensors()`."""
        return cls(**tensors)


@dataclass(frozen=True)
class Packing:
    """How rows become micro-batches: at most `micro_batch_tokens` padded tokens each, one completion at least.

    whole_groups: the rows of a group stay together, however many they are. sampling_masks: False evaluates the whole
    vocabulary, also where sampling was cut off. recorded_references: log-probabilities under the reference come from the
    rollouts, which all have them.
    """

    micro_batch_tokens: int
    whole_groups: bool = False
    sampling_masks: bool = True
    recorded_references: bool = False


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
    )


def make_micro_batches(rows: Sequence[Row], packing: Packing) -> list[MicroBatch]:
    """Rows of similar length together, and apart those of one completion, which need no mask and may be far longer."""
    units = by_group(rows) if packing.whole_groups else [[row] for row in rows]
    batches: list[list[Row]] = []
    packed, widest, count = False, 0, 0
    for (shares, longest, num_rows), unit in sorted(((_shape(unit), unit) for unit in units), key=_longest_first):
        if not batches or (count + num_rows) * widest > packing.micro_batch_tokens or packed != shares:
            batches.append([])
            packed, widest, count = shares, longest, 0
        batches[-1] += unit
        count += num_rows
    return [_tensors(batch, packing) for batch in batches]


def _longest_first(shaped: tuple[tuple[bool, int, int], list[Row]]) -> tuple[bool, int]:
    shares, longest, _ = shaped[0]
    return not shares, -longest


def _shape(rows: Sequence[Row]) -> tuple[bool, int, int]:
    """Whether completions share a row, the length of the longest row, and how many rows."""
    shares = any(len(row.members) > 1 for row in rows)
    lengths = [row.length for row in rows] if shares else [length for row in rows for length in row.lengths]
    return shares, max(lengths), len(lengths)


def attention_mask(segments_RL: Tensor, positions_RL: Tensor, reach: Reach = FULL) -> Tensor:
    """bool [R, L, L], True where query (second axis) may attend to key (third): the prompt, and its own completion so far, as
    far back as a layer reaches; its own tokens alone in a piece that begins anew. Distances are those of positions, for
    siblings stand between a completion and its prompt."""
    length = segments_RL.shape[1]
    queries, keys = segments_RL[:, :, None], segments_RL[:, None, :]
    seen = queries == keys
    seen |= (keys == 0) & (queries > 0)
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
    shares, width, num_rows = _shape(rows)
    shape = (num_rows, width)
    layout = _Layout(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int64))
    members = [member for row in rows for member in row.members]
    samplings = [row.group.sampling for row in rows for _ in row.members]
    sources = [source for row in rows for source in layout.add(row, shares)]
    rollouts = [member.rollout for member in members]
    lengths = [rollout.num_tokens for rollout in rollouts]
    optional = _targets(members)
    if packing.recorded_references:
        optional["logp_reference_N"] = _joined([r.reference for r in rollouts if r.reference is not None], np.float32)
    comparable = [_comparable(r, not sampling.truncation) for r, sampling in zip(rollouts, samplings, strict=True)]
    return MicroBatch(
        ids_RL=torch.from_numpy(layout.ids),
        positions_RL=torch.from_numpy(layout.positions),
        segments_RL=torch.from_numpy(layout.segments),
        source_N=_joined(sources, np.int64),
        target_N=_joined([rollout.sampled_ids for rollout in rollouts], np.int64),
        temperature_N=torch.from_numpy(np.repeat([sampling.temperature for sampling in samplings], lengths).astype(np.float32)),
        member_N=torch.from_numpy(np.repeat([member.index for member in members], lengths)),
        group_S=torch.tensor([row.group.number for row in rows for _ in row.members]),
        version_N=_joined([rollout.versions for rollout in rollouts], np.int64),
        comparable_N=_joined(comparable, np.bool_),
        logp_behaviour_N=_joined([rollout.logprobs for rollout in rollouts], np.float32),
        advantage_N=_joined([member.advantages for member in members], np.float32),
        **_sampling_masks(rollouts if packing.sampling_masks else ()),
        **optional,
    )


@dataclass
class _Layout:
    """Where each token of a micro-batch stands: int64 [R, L] of ids, positions and segments, and what is filled of them."""

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    row: int = -1
    end: int = 0
    """Of what is filled in `row`."""

    def add(self, row: Row, shares: bool) -> list[np.ndarray]:
        """The next row, and further ones for pieces that begin anew where completions do not share theirs. Returns of each
        completion int64 [N]: where its tokens are predicted, in the flattened rows."""
        self._next_row()
        prompt = row.group.prompt_ids
        num_prompt, last = len(prompt), self._begin_of_row + len(prompt) - 1
        self._put(prompt, 0, 0)
        sources, anew = [], -1
        for m, member in enumerate(row.members, 1):
            rollout = member.rollout
            predicting = np.zeros(rollout.length, np.int64)
            for piece in rollout.pieces:
                if piece.num_prompt:
                    anew -= 1
                    if not shares:
                        self._next_row()
                read = rollout.completion_ids[piece.start : piece.stop - 1]
                at = self._put(read, 0, anew) if piece.num_prompt else self._put(read, num_prompt, m)
                predicting[piece.start : piece.stop] = np.arange(at - 1, at + len(read))
            predicting[0] = last  # by the prompt, each other one by the token before it
            sources.append(predicting[rollout.sampled])
        return sources

    @property
    def _begin_of_row(self) -> int:
        width: int = self.ids.shape[1]
        return self.row * width

    def _next_row(self) -> None:
        self.row, self.end = self.row + 1, 0

    def _put(self, ids: np.ndarray, position: int, segment: int) -> int:
        """Where they begin in the flattened rows. position: of the first of them."""
        begin, self.end = self.end, self.end + len(ids)
        where = self.row, slice(begin, self.end)
        self.ids[where], self.segments[where] = ids, segment
        self.positions[where] = np.arange(position, position + len(ids))
        return self._begin_of_row + begin


def _comparable(rollout: Rollout, from_all: bool) -> np.ndarray:
    """bool [N]: sampled with no keys and values of older weights, and from all tokens or from a sampling mask that is known."""
    known = from_all or rollout.sampling_mask is not None
    spans = [span for span in rollout.spans if span.version is not None]
    return np.repeat([known and span.cache_version is None for span in spans], [span.num_tokens for span in spans])


def _sampling_masks(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Nothing where nothing was cut off from any of them."""
    kept = [rollout.sampling_mask for rollout in rollouts]
    if all(sampling_mask is None for sampling_mask in kept):
        return {}
    sizes = [np.zeros(r.num_tokens, np.int32) if s is None else s.sizes for r, s in zip(rollouts, kept, strict=True)]
    ids = [each.ids for each in kept if each is not None]
    return {"sizes_N": _joined(sizes, np.int64), "ids_K": _joined(ids, np.int64)}


def _targets(members: Sequence[Member]) -> dict[str, Tensor]:
    """float32 [N] by name: what all members have."""
    each = [{} if member.targets is None else member.targets.named() for member in members]
    return {name: _joined([own[name] for own in each], np.float32) for name in each[0] if all(name in own for own in each)}


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.int64 | np.float32 | np.bool_]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))
