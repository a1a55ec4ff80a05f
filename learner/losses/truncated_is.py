"""REINFORCE with one truncated importance weight from current to behaviour."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.corrections import ratio
from async_rlhf.learner.losses.base import LossInputs


def truncated_is(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - m_t sg(min(r_t, cap)) A_t log p_current, with r = p_current / p_behaviour and m the masks.

    The loss of AIPO in LlamaRL (Wu et al. 2025, arXiv 2505.24034, section 4.2): truncated above only. Without `is_cap` the
    weight is 1 and it is plain REINFORCE.
    """
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_behaviour_N)
    cap = config.is_cap
    truncated_N = torch.ones_like(r_N) if cap is None else r_N.clamp(max=cap)
    above_N = torch.zeros_like(r_N) if cap is None else (r_N > cap).float()
    loss_N = -weight_N * truncated_N * inputs.advantage_N * inputs.logp_current_N
    return loss_N, {"clip_ratio/region_mean": above_N.sum()}
