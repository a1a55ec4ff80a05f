"""PPO's clipped surrogate: per token, around the policy that sampled or the one that began the step, and per completion."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.corrections import ratio, sequence_log_ratio
from async_rlhf.learner.objective.loss import LossInputs


def ppo_clip(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - w_t S(r_t, A_t) with r = p_current / p_behaviour: `ppo_clip`. The clip region is that of the stale policy."""
    loss_N, outside_N = surrogate(inputs.logp_current_N, inputs.logp_behaviour_N, inputs.advantage_N, config)
    return weight_N * loss_N, {"clip_ratio/region_mean": outside_N.float().sum()}


def decoupled_ppo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - w_t S(r_t, A_t) with r = p_current / p_proximal, and w the correction of proximal against behaviour.

    Hilton et al. 2021 (arXiv 2110.00641) split PPO's old policy into a proximal one, around which it clips, and a
    behaviour one, against which it weighs; AReaL (arXiv 2505.24298, eq. 5) uses it for stale data. In the first update of
    a step r = 1, and the gradient is that of truncated importance-weighted policy gradient.
    """
    loss_N, outside_N = surrogate(inputs.logp_current_N, inputs.logp_proximal_N, inputs.advantage_N, config)
    return weight_N * loss_N, {"clip_ratio/region_mean": outside_N.float().sum()}


def surrogate(logp_N: Tensor, logp_old_N: Tensor, advantage_N: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """[N], bool [N]: `clipped_surrogate` of the ratio of each token."""
    return clipped_surrogate(ratio(logp_N, logp_old_N), advantage_N, config)


def clipped_surrogate(r: Tensor, advantage: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-S(r, A), and where its gradient is clipped away; both of the shape of r.

    S(r, A) = min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7), and for A < 0 never
    below c A, the dual clip of Ye et al. 2020 (arXiv 1912.09729, eq. 5): without it S has no lower limit in r.
    """
    high, low = 1 + config.clip_high, 1 - config.clip_low
    value = torch.minimum(r * advantage, r.clamp(low, high) * advantage)
    outside = ((r > high) & (advantage > 0)) | ((r < low) & (advantage < 0))
    if config.dual_clip is not None:
        value = torch.where(advantage < 0, torch.maximum(value, config.dual_clip * advantage), value)
        outside = outside | ((r > config.dual_clip) & (advantage < 0))
    return -value, outside


def gspo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[S]: - w S(s, A) with s the geometric mean of p_current / p_proximal over a completion's tokens.

    Zheng et al. 2025 (arXiv 2507.18071, eq. 5 and 7), around the proximal policy; w is the correction against behaviour. Mean
    ratios stay close to 1: `clip_low` and `clip_high` of some 1e-4 are what the paper uses.
    """
    return _of_sequences(inputs, weight_N, inputs.logp_proximal_N, config, mean=True)


def proximal_rloo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[S]: - m S(s, A) with s = p_current(y) / p_behaviour(y), the whole completion being one action, m the masks.

    Noukhovitch et al. 2025 (arXiv 2410.18252, section 4.1), meant for leave-one-out advantages.
    """
    return _of_sequences(inputs, weight_N, inputs.logp_behaviour_N, config, mean=False)


def _of_sequences(
    inputs: LossInputs, weight_N: Tensor, logp_old_N: Tensor, config: LossConfig, *, mean: bool
) -> tuple[Tensor, Mapping[str, Tensor]]:
    lengths_S = torch.bincount(inputs.sequence_N)
    first_S = lengths_S.cumsum(0) - lengths_S  # advantage and weight are equal along a completion
    log_ratio_S = sequence_log_ratio(inputs.logp_current_N, logp_old_N, inputs.sequence_N, mean=mean)
    loss_S, outside_S = clipped_surrogate(log_ratio_S.exp(), inputs.advantage_N[first_S], config)
    return weight_N[first_S] * loss_S, {"clip_ratio/region_mean": (outside_S * lengths_S).float().sum()}
