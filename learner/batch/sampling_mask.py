"""The tokens that each token was chosen among, and policies restricted to them. Pure.

Where sampling was cut off (top-k, top-p, ...), a token comes from b_S(a) = b(a) / b(S), with S the tokens that were left. Every
policy of the learner (current, proximal, reference) is then evaluated as p_S(a) = p(a) / p(S) on the *recorded* S, so that
an unchanged policy has ratio 1; p / b_S would be b(S) there. A token outside S is never sampled, so no weight can stand for
it, and what is estimated is not the gradient of p:

    sum over a in S of b_S(a) (p_S(a) / b_S(a)) A(a) grad log p_S(a) = grad E_{p_S}[A]

is the policy gradient of the masked policy. S is fixed by the prefix, so p_S is a policy like any other (Huang & Ontanon 2020,
"A closer look at invalid action masking", arXiv 2006.14171); masks recorded from truncated sampling are those of
DeepSeek-V3.2 (2025, arXiv 2512.02556, section 3.1, "keep sampling mask"). Logits outside S get no gradient, and divergence and
entropy are those of p_S: what the policy does outside is neither seen nor held.

Axes: N tokens, V vocabulary, K ids of all sampling masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SamplingMasks(NamedTuple):
    """sizes_N: int64, tokens that each was one of, 0 where nothing was cut off. ids_K: int64, one mask after the other."""

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
