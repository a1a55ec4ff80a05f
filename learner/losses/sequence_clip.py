"""PPO's clipped surrogate with one ratio per completion: GSPO by its geometric mean, Proximal RLOO by its product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.corrections import sequence_log_ratio
from async_rlhf.learner.losses.base import LossInputs
from async_rlhf.learner.losses.ppo_clip import clipped_surrogate


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
