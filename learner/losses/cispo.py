"""CISPO: the importance weight is clipped, not the update, so every token keeps its gradient."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.corrections import ratio
from async_rlhf.learner.losses.base import LossInputs


def cispo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - w_t sg(min(r_t, 1 + high)) A_t log p_current, with r = p_current / p_proximal.

    MiniMax-M1 (2025, arXiv 2506.13585, eq. 4), with its lower limit left out, as there. w is the correction of proximal against
    behaviour. A token with a high ratio is not dropped as by PPO's clip, its weight stops growing.
    """
    r_N = ratio(inputs.logp_current_N.detach(), inputs.logp_proximal_N)
    high = 1 + config.clip_high
    loss_N = -weight_N * r_N.clamp(max=high) * inputs.advantage_N * inputs.logp_current_N
    return loss_N, {"clip_ratio/region_mean": (r_N > high).float().sum()}
