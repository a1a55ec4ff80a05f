"""The corrections a configuration asks for, multiplied: at most one importance weight, any number of masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.corrections.masks import off_policy_mask, sequence_mask, token_mask
from async_rlhf.learner.corrections.ratios import MAX_LOG_RATIO
from async_rlhf.learner.corrections.weights import sequence_weight, truncated_weight

if TYPE_CHECKING:
    from async_rlhf.learner.losses.base import LossInputs


@dataclass(frozen=True)
class Correction:
    """weight_N: float32, masks multiplied in, no gradient. kept_N: bool, what no mask took. sums: over tokens."""

    weight_N: Tensor
    kept_N: Tensor
    sums: Mapping[str, Tensor]


def correct(inputs: LossInputs, config: LossConfig, *, weigh: bool, whole_sequences: bool) -> Correction:
    """The correction of proximal against behaviour that a loss multiplies its terms by.

    weigh: False for a loss that has the ratio to the behaviour policy in it already: it takes masks only.
    whole_sequences: True for a loss whose terms are completions: its weight is the completion's, whatever `is_level` says.
    """
    proximal_N, behaviour_N, sequence_N = inputs.logp_proximal_N.detach(), inputs.logp_behaviour_N, inputs.sequence_N
    geometric = config.sequence_ratio == "geometric"
    weight_N = torch.ones_like(inputs.advantage_N)
    if weigh and config.is_cap is not None:
        if whole_sequences or config.is_level == "sequence":
            weight_N = sequence_weight(proximal_N, behaviour_N, sequence_N, config.is_cap, geometric=geometric)
        else:
            weight_N = truncated_weight(proximal_N, behaviour_N, config.is_cap)
    kept_N = torch.ones_like(inputs.advantage_N, dtype=torch.bool) if inputs.mask_N is None else inputs.mask_N > 0
    if config.token_mask is not None:
        kept_N = kept_N & token_mask(proximal_N, behaviour_N, *config.token_mask)
    if config.sequence_mask is not None:
        kept_N = kept_N & sequence_mask(proximal_N, behaviour_N, sequence_N, *config.sequence_mask, geometric=geometric)
    if config.off_policy_delta is not None:
        kept_N = kept_N & off_policy_mask(proximal_N, behaviour_N, inputs.advantage_N, sequence_N, config.off_policy_delta)
    beyond_N = (proximal_N - behaviour_N).abs() > MAX_LOG_RATIO
    sums = {
        "is/masked_ratio": (~kept_N).float().sum(),
        "is/clamped_ratio": beyond_N.float().sum(),
        "is/weight_mean": weight_N.sum(),
    }
    return Correction(weight_N * kept_N, kept_N, sums)
