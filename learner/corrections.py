"""Importance weights for data that other weights sampled. Pure functions over flat [N] tensors.

The three policies are called behaviour (sampled the token), proximal (the learner at the start of the step) and current
(with gradient). Log-ratios are clamped before `exp`, since `where(mask, exp(x), 0)` has NaN gradients at overflow.
"""

from __future__ import annotations

from torch import Tensor

# e^20 is far beyond any useful weight and far below float32 overflow; 20 is also the clamp of verl.
MAX_LOG_RATIO = 20.0


def ratio(logp_a_N: Tensor, logp_b_N: Tensor) -> Tensor:
    """[N]: exp(log p_a - log p_b), the log-ratio clamped to +-MAX_LOG_RATIO."""
    return (logp_a_N - logp_b_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weight(logp_proximal_N: Tensor, logp_behaviour_N: Tensor, cap: float) -> Tensor:
    """[N], no gradient: min(p_proximal / p_behaviour, cap), per token.

    Truncated importance sampling (Ionides 2008), per token as in Yao et al. 2025 ("Your efficient RL framework secretly
    brings you off-policy training"). Truncated above only: raising small weights would add bias without need.
    """
    return ratio(logp_proximal_N.detach(), logp_behaviour_N).clamp(max=cap)


def effective_sample_size(weight_N: Tensor) -> Tensor:
    """Scalar in (0, 1]: (sum w)^2 / (N sum w^2), Kish's effective sample size as a share of N."""
    share = weight_N.sum().square() / (len(weight_N) * weight_N.square().sum())
    return share.clamp(max=1.0)  # equal weights round to a hair above
