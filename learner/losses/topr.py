"""TOPR: what was good is imitated, what was bad is unlearned only as far as the policy still does it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.corrections import sequence_log_ratio
from async_rlhf.learner.losses.base import LossInputs


def topr(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - m_t a A_t log p_current with a = 1 for A > 0 and sg(min(R, 1)) for A <= 0, m the masks.

    R is the completion's ratio p_current / p_behaviour, the product over its tokens (Le Roux et al. 2025, "Tapered off-policy
    REINFORCE", arXiv 2503.14286, eq. 8 with its canonical limits). It can only shrink a weight here, so its growth with the
    length is harmless: a long bad completion that the policy has left weighs nothing.
    """
    log_ratio_S = sequence_log_ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N, inputs.sequence_N, mean=False)
    taper_N = log_ratio_S.exp().clamp(max=1.0)[inputs.sequence_N]
    bad_N = inputs.advantage_N <= 0
    loss_N = -weight_N * torch.where(bad_N, taper_N, 1.0) * inputs.advantage_N * inputs.logp_current_N
    return loss_N, {"clip_ratio/region_mean": (bad_N & (log_ratio_S > 0)[inputs.sequence_N]).float().sum()}
