"""The tensors of one forward pass and of its loss, and what each position of them attends to. No gradient, no model here.

Everything the loss needs is flat over the N loss-bearing tokens of a micro-batch, so padding never reaches it.

Axes: R rows, L positions of a row, N loss-bearing tokens (those that were sampled; what an environment gave is only read), S
completions, B blocks of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.attention import FULL, Reach


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
        """The masks of `rows` tokens at a time."""
        sizes = torch.split(self.sizes_N, rows)
        ids = torch.split(self.ids_K, [int(each.sum()) for each in sizes])
        return [SamplingMasks(*pair) for pair in zip(sizes, ids, strict=True)]

    def of(self, index_M: Tensor) -> SamplingMasks:
        """The masks of some tokens, by ascending index."""
        chosen_N = torch.zeros_like(self.sizes_N, dtype=torch.bool).index_fill(0, index_M, True)
        return SamplingMasks(self.sizes_N[index_M], self.ids_K[torch.repeat_interleave(chosen_N, self.sizes_N)])

    def restrict_(self, logits_NV: Tensor) -> Tensor:
        """The same logits, -inf outside each sampling mask; in place, and differentiable. IndexError for an unknown id."""
        index = torch.repeat_interleave(self.sizes_N), self.ids_K
        kept_K = logits_NV[index]
        return logits_NV.masked_fill_((self.sizes_N > 0)[:, None], -torch.inf).index_put_(index, kept_K)


_OF_HOST = frozenset(("blocks_B4", "prompts_Q4", "images_I2"))


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The inputs of one forward pass of a policy, and the tokens whose log-probabilities are requested.

    ids_RL, positions_RL: int64. blocks_B4: int64, of each block its first query, the end of its queries, its first key, the end
    of its keys, in the flattened [R L]. Its queries attend to its keys; where these are the same, to those up to their own.
    Blocks of the second kind come first, and together have every position but padding once.
    source_N: int64, index into the flattened [R L] of the position whose logits predict the token. target_N: int64 token ids.
    temperature_N: float32. sizes_N, ids_K: the tokens that each was chosen among, as in `SamplingMasks`; None where nothing was
    cut off. experts_PMk: int16 [R L, M, k], the experts of each position in each mixture layer, -1 where they are not
    known; None where none are. prompts_Q4: int64, of each prompt, or beginning of a piece, with images its begin and end in the
    flattened [R L], the end of what follows it in its row, and how many images it has; images_I2: int64, the digests of all,
    one prompt after the other (see `digests`); None where none has any.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    blocks_B4: Tensor
    source_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    sizes_N: Tensor | None = None
    ids_K: Tensor | None = None
    experts_PMk: Tensor | None = None
    prompts_Q4: Tensor | None = None
    images_I2: Tensor | None = None

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
        """Whether positions of a row do not simply attend to all before them."""
        return len(self.blocks_B4) > len(self.ids_RL)

    @property
    def sequence_N(self) -> Tensor:
        """int64 [N]: which completion of the micro-batch a token belongs to, ascending from 0."""
        number_N: Tensor = self.member_N.unique_consecutive(return_inverse=True)[1]  # type: ignore[no-untyped-call]
        return number_N

    def to(self, device: torch.device) -> MicroBatch:
        """All but what the host reads, which would wait for a device each time."""
        return MicroBatch.of({name: each if name in _OF_HOST else each.to(device) for name, each in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MicroBatch:
        """The batch with these `tensors()`."""
        return cls(**tensors)


def as_numbers(digests: Sequence[str]) -> Tensor:
    """int64 [I, 2] of digests of 32 hexadecimal digits."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex("".join(digests)), "<i8").reshape(-1, 2).copy())


def digests(numbers_I2: Tensor) -> list[str]:
    """What `as_numbers` was given."""
    return [each.astype("<i8").tobytes().hex() for each in numbers_I2.numpy()]


def attention_mask(blocks_B4: Tensor, positions_RL: Tensor, reach: Reach = FULL, together_RL: Tensor | None = None) -> Tensor:
    """bool [R, L, L], True where query (second axis) may attend to key (third): as blocks say, as far back as a layer reaches.
    Distances are those of positions, for siblings stand between a completion and its prompt. Padding sees itself. together_RL:
    int64, equal numbers from 0 on see each other, also those behind them."""
    rows, length = positions_RL.shape
    seen = torch.zeros(rows, length, length, dtype=torch.bool, device=positions_RL.device)
    for query, end, key, stop in blocks_B4.tolist():
        row, begin = divmod(query, length)
        seen[row, begin : begin + end - query, key - row * length : stop - row * length] = True
    before = torch.ones(length, length, dtype=torch.bool, device=positions_RL.device).tril()
    if together_RL is not None:
        before = before | ((together_RL[:, :, None] == together_RL[:, None]) & (together_RL >= 0)[:, :, None])
    seen &= before
    seen &= reach.covers(positions_RL[:, :, None], positions_RL[:, None, :])
    seen.diagonal(dim1=1, dim2=2).fill_(True)
    return seen


def attention_bias(seen_RQK: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, 1, Q, K] in `dtype`, added to the products of queries and keys: 0 where they are seen, else the lowest number. In
    `dtype` they are computed in, and in lines of a multiple of 8 numbers, so that no layer makes a copy of it."""
    rows, queries, keys = seen_RQK.shape
    lines = torch.full((rows, queries, -(-keys // 8) * 8), torch.finfo(dtype).min, dtype=dtype, device=seen_RQK.device)
    return lines[..., :keys].masked_fill_(seen_RQK, 0)[:, None]
