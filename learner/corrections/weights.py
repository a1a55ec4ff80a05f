"""Truncated importance weights. They carry no gradient and are cut above only: raising small ones would add bias."""

from __future__ import annotations

from torch import Tensor

from async_rlhf.learner.corrections.ratios import ratio, sequence_log_ratio


def truncated_weight(logp_proximal_N: Tensor, logp_behaviour_N: Tensor, cap: float) -> Tensor:
    """[N]: min(p_proximal / p_behaviour, cap), per token.

    Truncated importance sampling (Ionides 2008), per token as in Yao et al. 2025 ("Your efficient RL framework secretly
    brings you off-policy training").
    """
    return ratio(logp_proximal_N.detach(), logp_behaviour_N).clamp(max=cap)


def sequence_weight(
    logp_proximal_N: Tensor, logp_behaviour_N: Tensor, sequence_N: Tensor, cap: float, *, geometric: bool
) -> Tensor:
    """[N], equal along a completion: min(its ratio, cap); the ratio is the geometric mean over its tokens or their product."""
    log_ratio_S = sequence_log_ratio(logp_proximal_N.detach(), logp_behaviour_N, sequence_N, mean=geometric)
    return log_ratio_S.exp().clamp(max=cap)[sequence_N]
