"""REINFORCE with a bounded weight in place of PPO's clip, so that every token keeps its gradient: CISPO, truncated IS, TOPR."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.corrections import ratio, sequence_log_ratio
from async_rlhf.learner.objective.loss import LossInputs


def cispo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - w_t sg(min(r_t, 1 + high)) A_t log p_current, with r = p_current / p_proximal.

    MiniMax-M1 (2025, arXiv 2506.13585, eq. 4), with its lower limit left out, as there. w is the correction of proximal against
    behaviour. A token with a high ratio is not dropped as by PPO's clip, its weight stops growing.
    """
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_proximal_N)
    high = 1 + config.clip_high
    loss_N = -weight_N * r_N.clamp(max=high) * inputs.advantage_N * inputs.logp_current_N
    return loss_N, {"clip_ratio/region_mean": (r_N > high).float().sum()}


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
