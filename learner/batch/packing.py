"""An update's rows over the ranks, and to micro-batches: the one place that shifts by one, packs and cuts.

Every completion attends to its prompt and to itself, never to its siblings; a piece that begins a row anew attends to itself
alone. A completion is never cut over micro-batches, and where a loss compares siblings neither is a group.

Rows go to the rank with the least to do, longest first; every rank gets equally many micro-batches, padding batches where it
has fewer, since ranks that share parameters must make every pass together.

How completions share the computation of their prompt (`Sharing`) follows from how a model can be computed:

blocks  all rows of a micro-batch stand one after the other in a single one without padding, and attention is computed block by
        block: no token and no pair of tokens more than once. But a token behind a shared prompt joins two blocks, which costs
        as much as `_JOIN` pairs: completions far longer than their prompt have one of their own.
rows    a row has a prompt and some of its completions, under a mask of all its pairs; how many is weighed (`room_beside`).
none    a row has one piece of one completion, and needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.record import Piece, Rollout
from async_rlhf.buffers.routing import RoutingArray
from async_rlhf.learner.batch.micro_batch import MicroBatch, as_numbers
from async_rlhf.learner.batch.rows import BatchRow, RowMember, by_group
from async_rlhf.learner.config import room_beside
from async_rlhf.learner.objective.objective import Counts

Sharing = Literal["blocks", "rows", "none"]
# Measured on one thread with heads of 32 numbers: 8 completions of 1,024 tokens behind 64.
_JOIN = 70


@dataclass(frozen=True)
class Packing:
    """How rows become micro-batches: at most `micro_batch_tokens` padded tokens each, but one prompt at least with one
    completion, and beside a prompt with as many tokens of its completions."""

    micro_batch_tokens: int
    sharing: Sharing = "blocks"
    row_tokens: int | None = None
    """Most tokens of a prompt with several of its completions, None for as many as that."""
    token_cost: float = math.inf
    """In pairs, as `config.token_cost`."""
    whole_groups: bool = False
    """A group is in one micro-batch, however many tokens it has."""
    sampling_masks: bool = True
    """False evaluates the whole vocabulary, also where sampling was cut off."""
    recorded_references: bool = False
    """Log-probabilities under the reference come from the rollouts, which all have them."""
    patches: Callable[[tuple[str, ...]], int] | None = None
    """Tokens that a tower which learns holds for the images of a prompt; they count in a micro-batch, once. None for a frozen
    tower: what it made of images is kept, and nothing of its pass."""

    def of_images(self, rows: Sequence[BatchRow], beside: Sequence[BatchRow]) -> int:
        """Patches of the images of these rows that no row beside them has."""
        if self.patches is None:
            return 0
        read, known = ({images for row in each for images in row.images} for each in (rows, beside))
        return sum(map(self.patches, read - known))

    def room(self, row: BatchRow) -> float:
        """Tokens of several completions beside their prompt."""
        prompt, most = len(row.group.prompt_ids), float(self.micro_batch_tokens)
        spared = (len(row.members) - 1) * prompt * (self.token_cost + prompt / 2)
        if self.sharing == "none" or (self.sharing == "blocks" and spared < _JOIN * (row.length - prompt)):
            return 0
        if self.sharing == "rows":
            most = min(most, room_beside(prompt, self.token_cost))
        elif self.whole_groups:
            most = math.inf
        return most if self.row_tokens is None else min(most, self.row_tokens - prompt)


@dataclass(frozen=True)
class Update:
    """One rank's part of one optimizer update. `counts` are those of the whole update."""

    batches: tuple[MicroBatch, ...]
    counts: Counts
    number: int
    """Updates of the same rows have the same number: results computed for the first serve the others."""


def partition(updates: Sequence[Sequence[BatchRow]], ranks: int, packing: Packing) -> list[list[Update]]:
    """The part of every update for every rank."""
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


def count(rows: Sequence[BatchRow]) -> Counts:
    lengths = [member.rollout.num_tokens for row in rows for member in row.members]
    return Counts(num_tokens=sum(lengths), num_sequences=len(lengths), num_groups=len({row.group.number for row in rows}))


def partition_rows(rows: Sequence[BatchRow], ranks: int) -> list[list[BatchRow]]:
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
        **dict.fromkeys(("ids_RL", "positions_RL"), position),
        **dict.fromkeys(("source_N", "target_N", "member_N", "group_S", "version_N"), nothing),
        **dict.fromkeys(("temperature_N", "logp_behaviour_N", "advantage_N"), zero),
        blocks_B4=torch.tensor([[0, 1, 0, 1]]),
        comparable_N=nothing.bool(),
    )


def make_micro_batches(rows: Sequence[BatchRow], packing: Packing) -> list[MicroBatch]:
    """Micro-batches, longest rows first. In blocks a row goes where it fits; else by similar length, apart those of one
    completion, which need no mask and may be far longer."""
    cut = [part for row in rows for part in _cut(row, packing)]
    units = by_group(cut) if packing.whole_groups else [[row] for row in cut]
    batches = _filled(units, packing) if packing.sharing == "blocks" else _alike(units, packing)
    return [_tensors(batch, packing) for batch in batches]


def _cut(row: BatchRow, packing: Packing) -> list[BatchRow]:
    """Cut a row into rows with as many completions as fit, at least one each."""
    room, used = packing.room(row), 0
    parts: list[list[RowMember]] = [[]]
    for member in row.members:
        if parts[-1] and used + member.rollout.num_read > room:
            parts.append([])
            used = 0
        parts[-1].append(member)
        used += member.rollout.num_read
    return [replace(row, members=tuple(part)) for part in parts]


def _filled(units: Sequence[list[BatchRow]], packing: Packing) -> list[list[BatchRow]]:
    batches: list[list[BatchRow]] = []
    rooms: list[int] = []
    sized = [(sum(row.length for row in unit), unit) for unit in units]
    for size, unit in sorted(sized, key=lambda sized: -sized[0]):
        sizes = (size + packing.of_images(unit, batch) for batch in batches)
        at = next((at for at, (own, room) in enumerate(zip(sizes, rooms, strict=True)) if own <= room), len(rooms))
        if at == len(rooms):
            batches.append([])
            rooms.append(packing.micro_batch_tokens)
        rooms[at] -= size + packing.of_images(unit, batches[at])
        batches[at] += unit
    return batches


def _alike(units: Sequence[list[BatchRow]], packing: Packing) -> list[list[BatchRow]]:
    batches: list[list[BatchRow]] = []
    packed, widest, count, patches = False, 0, 0, 0
    for (shares, longest, num_rows), unit in sorted(((_shape(unit), unit) for unit in units), key=_longest_first):
        more = packing.of_images(unit, batches[-1]) if batches else 0
        if not batches or (count + num_rows) * widest + patches + more > packing.micro_batch_tokens or packed != shares:
            batches.append([])
            packed, widest, count, patches = shares, longest, 0, 0
        patches += packing.of_images(unit, batches[-1])
        batches[-1] += unit
        count += num_rows
    return batches


def _longest_first(shaped: tuple[tuple[bool, int, int], list[BatchRow]]) -> tuple[bool, int]:
    shares, longest, _ = shaped[0]
    return not shares, -longest


def _shape(rows: Sequence[BatchRow]) -> tuple[bool, int, int]:
    """Whether completions share a row, the length of the longest row, and how many rows."""
    shares = any(len(row.members) > 1 for row in rows)
    lengths = [row.length for row in rows] if shares else [length for row in rows for length in row.lengths]
    return shares, max(lengths), len(lengths)


def _tensors(rows: Sequence[BatchRow], packing: Packing) -> MicroBatch:
    shares, width, num_rows = _shape(rows)
    if packing.sharing == "blocks":
        shares, width, num_rows = True, sum(row.length for row in rows), 1
    members = [member for row in rows for member in row.members]
    recorded = next((member.rollout.routing for member in members if member.rollout.routing is not None), None)
    experts = None if recorded is None else np.full((num_rows * width, *recorded.shape[1:]), -1, np.int16)
    layout = _TokenLayout(np.zeros((num_rows, width), np.int64), np.zeros((num_rows, width), np.int64), experts=experts)
    samplings = [row.group.sampling for row in rows for _ in row.members]
    sources: list[np.ndarray] = []
    for at, row in enumerate(rows):
        if at and packing.sharing != "blocks":
            layout.next_row()
        sources += layout.add(row, shares)
    rollouts = [member.rollout for member in members]
    lengths = [rollout.num_tokens for rollout in rollouts]
    optional = _targets(members)
    if experts is not None:
        optional["experts_PMk"] = torch.from_numpy(experts)
    if layout.prompts:
        optional |= {"prompts_Q4": torch.tensor(layout.prompts), "images_I2": as_numbers(layout.images)}
    if packing.recorded_references:
        optional["logp_reference_N"] = _joined([r.reference for r in rollouts if r.reference is not None], np.float32)
    from_all = [not row.group.sampling.truncation for row in rows]
    comparable = [_comparable(each.rollout, of) for row, of in zip(rows, from_all, strict=True) for each in row.members]
    return MicroBatch(
        ids_RL=torch.from_numpy(layout.ids),
        positions_RL=torch.from_numpy(layout.positions),
        blocks_B4=torch.tensor([*layout.own, *layout.of_prompts]),
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
class _TokenLayout:
    """The place of each token of a micro-batch: int64 [R, L] of ids and positions, filled up to `end` of them, flattened."""

    ids: np.ndarray
    positions: np.ndarray
    end: int = 0
    own: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Blocks of attention of pieces to themselves."""
    of_prompts: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Blocks of attention of completions to the prompt they share."""
    experts: np.ndarray | None = None
    """As `PolicyInputs.experts_PMk`."""
    prompts: list[tuple[int, int, int, int]] = field(default_factory=list)
    """As `PolicyInputs.prompts_Q4`."""
    images: list[str] = field(default_factory=list)
    """Digests of all their images."""

    def add(self, row: BatchRow, shares: bool) -> list[np.ndarray]:
        """Append a row, with a row for each piece that begins anew where completions do not share theirs. Returns for each
        completion int64 [N]: where its tokens are predicted."""
        prompt, begin = row.group.prompt_ids, self.end
        self._put(prompt, 0, row.members[0].rollout.routing, 0)
        behind = self.end
        members = [(member.rollout, np.zeros(member.rollout.length, np.int64)) for member in row.members]
        for rollout, predicting in members:
            at = self._read(rollout, 0, rollout.pieces[0], len(prompt), len(prompt), predicting)
            predicting[0] = behind - 1  # by the prompt, each other one by the token before it
            if len(members) > 1:
                self._attend(at)
        self._see(begin, behind, row.group.images)
        if len(members) == 1:
            self._attend(begin)
        else:
            self.own.append((begin, behind, begin, behind))
            if behind < self.end:
                self.of_prompts.append((behind, self.end, begin, behind))
        for rollout, predicting in members:
            for number, piece in enumerate(rollout.pieces[1:], 1):
                if not shares:
                    self.next_row()
                # Of each piece before, the last token is not read.
                self._attend(self._read(rollout, number, piece, 0, len(prompt) + piece.start - number, predicting))
        return [predicting[rollout.sampled] for rollout, predicting in members]

    def next_row(self) -> None:
        width = self.ids.shape[1]
        self.end = -(-self.end // width) * width

    def _read(self, rollout: Rollout, number: int, piece: Piece, position: int, routed: int, predicting: np.ndarray) -> int:
        """Where it begins. number: of the piece. routed: its first position in the rollout's routing. predicting: int64 [T],
        filled in where the tokens of the piece are predicted, all but its first."""
        begin = self.end
        self._put(rollout.completion_ids[piece.start : piece.stop - 1], position, rollout.routing, routed)
        if rollout.images:
            self._see(begin, begin + rollout.heads[number], rollout.images[number])
        predicting[piece.start : piece.stop] = np.arange(begin - 1, self.end)
        return begin

    def _see(self, begin: int, end: int, images: Sequence[str]) -> None:
        """Note images whose places lie in [begin, end), and that what has been put behind follows them."""
        if images:
            self.prompts.append((begin, end, self.end, len(images)))
            self.images += images

    def _attend(self, begin: int) -> None:
        """End the piece that began there."""
        if begin < self.end:
            self.own.append((begin, self.end, begin, self.end))

    def _put(self, ids: np.ndarray, position: int, routing: RoutingArray | None, routed: int) -> None:
        """position, routed: of the first of them, in its text and in `routing`."""
        where = slice(self.end, self.end + len(ids))
        if routing is not None and self.experts is not None:
            self.experts[where] = routing[routed : routed + len(ids)]
        self.ids.reshape(-1)[where] = ids
        self.positions.reshape(-1)[where] = np.arange(position, position + len(ids))
        self.end += len(ids)


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


def _targets(members: Sequence[RowMember]) -> dict[str, Tensor]:
    """float32 [N] by name: the targets that all members have."""
    each = [{} if member.targets is None else member.targets.named() for member in members]
    return {name: _joined([own[name] for own in each], np.float32) for name in each[0] if all(name in own for own in each)}


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.int64 | np.float32 | np.bool_]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))
