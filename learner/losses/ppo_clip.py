"""PPO's clipped surrogate with a truncated importance weight against the behaviour policy."""

from __future__ import annotations

import torch

from learner.config import LossConfig
from learner.corrections import ratio, truncated_weight
from learner.losses.base import LossInputs, LossOutputs


def ppo_clip(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """L = - sum_t w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), for A_t < 0 never below c A_t

    with r = p_current / p_proximal and w = min(p_proximal / p_behaviour, cap).

    The clipped surrogate is Schulman et al. 2017 (arXiv 1707.06347, eq. 7); the split into a proximal policy, around
    which it clips, and a behaviour policy, against which it weighs, is Hilton et al. 2021 (arXiv 2110.00641); the lower
    limit for negative advantages (dual clip) is Ye et al. 2020 (arXiv 1912.09729, eq. 5). In the first update of a step
    r = 1 and the gradient is that of truncated importance-weighted policy gradient.
    """
    advantage = inputs.advantage_N
    r = ratio(inputs.logp_current_N, inputs.logp_proximal_N)
    clipped = r.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(r * advantage, clipped * advantage)
    surrogate = torch.where(advantage < 0, torch.maximum(surrogate, config.dual_clip * advantage), surrogate)
    if config.is_cap is None:
        weight = torch.ones_like(advantage)
    else:
        weight = truncated_weight(inputs.logp_proximal_N, inputs.logp_behaviour_N, config.is_cap)
    outside = ((r > 1 + config.clip_high) & (advantage > 0)) | ((r < 1 - config.clip_low) & (advantage < 0))
    return LossOutputs(total=-(weight * surrogate).sum(), sums={"clip_ratio/region_mean": outside.float().sum()})
