"""Corrections for data that other weights sampled: ratios, truncated weights and masks; and the divergence of the policy
from a frozen reference, estimated from sampled tokens.

The three policies are called behaviour (sampled the token), proximal (the learner at the start of the step) and current (with
gradient). Log-ratios are clamped before `exp`, since `where(mask, exp(x), 0)` has NaN gradients at overflow; what is not a
number stays so, and refuses the step. Weights and masks carry no gradient. Weights are cut above only: raising small ones would
add bias. True in a mask is kept; a masked token leaves the numerator of a loss and stays in its denominator, so that a mask
never raises the learning rate of what is left.

Axes: N tokens of S completions.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rlhf.buffers.record import Float32Array

# e^20 is far beyond any useful weight and far below float32 overflow; 20 is also the clamp of verl.
MAX_LOG_RATIO = 20.0
Estimator = Literal["k1", "k2", "k3"]


def log_ratio(logp_a_N: Tensor, logp_b_N: Tensor) -> Tensor:
    """[N]: log p_a - log p_b, clamped to +-MAX_LOG_RATIO (with no gradient beyond)."""
    return (logp_a_N - logp_b_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(logp_a_N: Tensor, logp_b_N: Tensor) -> Tensor:
    """[N]: exp(log p_a - log p_b), the log-ratio clamped to +-MAX_LOG_RATIO."""
    return log_ratio(logp_a_N, logp_b_N).exp()


def sequence_log_ratio(logp_a_N: Tensor, logp_b_N: Tensor, sequence_N: Tensor, *, mean: bool) -> Tensor:
    """[S]: sum, or mean, over a completion's tokens of log p_a - log p_b, clamped to +-MAX_LOG_RATIO.

    The mean is the log of the geometric mean, as in GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 7); the sum is the
    completion's own ratio, which grows or vanishes exponentially with its length.
    """
    lengths_S = torch.bincount(sequence_N)
    sums_S = torch.zeros(len(lengths_S), dtype=logp_a_N.dtype, device=logp_a_N.device)
    sums_S = sums_S.index_add(0, sequence_N, logp_a_N - logp_b_N)
    return (sums_S / lengths_S if mean else sums_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_sample_size(weight_N: Tensor) -> Tensor:
    """Scalar in (0, 1]: (sum w)^2 / (N sum w^2), Kish's effective sample size as a share of N."""
    share = weight_N.sum().square() / (len(weight_N) * weight_N.square().sum())
    return share.clamp(max=1.0)  # equal weights round to a hair above


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


def token_mask(logp_proximal_N: Tensor, logp_behaviour_N: Tensor, low: float, high: float) -> Tensor:
    """bool [N]: low <= p_proximal / p_behaviour <= high, per token.

    The two-sided mask of IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855): together with an importance weight
    that is not truncated below `high`, it is its calibration function.
    """
    r_N = ratio(logp_proximal_N.detach(), logp_behaviour_N)
    return (r_N >= low) & (r_N <= high)


def sequence_mask(logp_proximal_N: Tensor, logp_behaviour_N: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """bool [N], equal along a completion: low <= the geometric mean of its tokens' ratios <= high."""
    r_S = sequence_log_ratio(logp_proximal_N.detach(), logp_behaviour_N, sequence_N, mean=True).exp()
    return ((r_S >= low) & (r_S <= high))[sequence_N]


def off_policy_mask(
    logp_proximal_N: Tensor, logp_behaviour_N: Tensor, advantage_N: Tensor, sequence_N: Tensor, delta: float
) -> Tensor:
    """bool [N]: False where A < 0 and the completion's mean log p_behaviour / p_proximal is above `delta`.

    The off-policy sequence mask of DeepSeek-V3.2 (2025, arXiv 2512.02556, section 3.1): a bad completion that the policy would
    hardly write any more has nothing left to teach, and pushing it down is what destabilises.
    """
    mean_S = sequence_log_ratio(logp_behaviour_N, logp_proximal_N.detach(), sequence_N, mean=True)
    return ~((advantage_N < 0) & (mean_S > delta)[sequence_N])


def divergence_mask(
    logp_proximal_N: Tensor, logp_behaviour_N: Tensor, sequence_N: Tensor, limits: tuple[float, float]
) -> Tensor:
    """bool [N], equal along a completion: mean and maximum over its tokens of an estimate of KL(behaviour | proximal) are at
    most the two limits.

    Trust region masking (Li et al. 2025, arXiv 2512.23075) as in verl's `seq_mean_k3` and `seq_max_k3`: with r = p_proximal /
    p_behaviour r - 1 - log r, of which the mean over behaviour's tokens is the divergence. A single token decides the maximum.
    """
    k_N = estimate(logp_behaviour_N, logp_proximal_N.detach(), "k3")
    lengths_S = torch.bincount(sequence_N)
    zero_S = k_N.new_zeros(len(lengths_S))
    mean_S = zero_S.index_add(0, sequence_N, k_N) / lengths_S
    num_beyond_S = zero_S.index_add(0, sequence_N, (k_N > limits[1]).to(k_N.dtype))
    return ~((mean_S > limits[0]) | (num_beyond_S > 0))[sequence_N]


def second_moment_mask(log_ratio_N: Float32Array, limit: float) -> npt.NDArray[np.bool_]:
    """bool [N]: the largest set of tokens, smallest |log-ratio| first, whose mean squared log-ratio is at most `limit`.

    M2PO (Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161). Over the whole batch: the mean of a part shows
    nothing about the whole. Log-ratios are proximal / behaviour, where the paper has current / behaviour: the same in the first
    update of a step, and in later ones the clip around the proximal policy limits the rest. One that is not a number is kept,
    so that the step is refused.
    """
    squares = np.minimum(np.abs(log_ratio_N.astype(np.float64)), MAX_LOG_RATIO) ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(order) + 1)
    kept = np.zeros(len(order), np.bool_)
    kept[order[: int(np.sum(means <= limit))]] = True
    kept[np.isnan(log_ratio_N)] = True
    return kept


def interpolated(logp_current_N: Tensor, logp_behaviour_N: Tensor, staleness_N: Tensor) -> Tensor:
    """[N], no gradient: log p_behaviour + (a - 1) / a (log p_current - log p_behaviour), with a the token's staleness.

    Log-linear in versions, as AReaL's `loglinear`: the proximal policy is taken to be the one a version before the
    current, so of the a versions between behaviour and current it has come a - 1. Per token, hence per version span: a
    completion written by several versions has several. At staleness 0 and 1 it is the behaviour policy itself.
    """
    age_N = staleness_N.abs().clamp(min=1).to(logp_current_N.dtype)
    return logp_behaviour_N + (age_N - 1) / age_N * (logp_current_N.detach() - logp_behaviour_N)


def estimate(logp_N: Tensor, logp_reference_N: Tensor, estimator: Estimator) -> Tensor:
    """[N]: the estimator of the divergence of current from reference, of each token.

    With x = log p_current - log p_reference of a token sampled from p_current, the mean of each is the divergence, or nearly
    (Schulman 2020, "Approximating KL divergence"): k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x.
    """
    x_N = log_ratio(logp_N, logp_reference_N)
    if estimator == "k1":
        return x_N
    if estimator == "k2":
        return x_N.square() / 2
    return (-x_N).exp() - 1 + x_N


def binary_kl(logp_N: Tensor, logp_reference_N: Tensor) -> Tensor:
    """[N]: KL of p from the reference over two events, this token or another: p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    What DPPO measures a token by (arXiv 2602.04879, eq. 14): a lower bound of the divergence of the two distributions. Infinite
    where q = 1 > p, or is above 1 by rounding. verl adds 1e-8 to both 1 - p and 1 - q, which shows where q is that near to 1.
    """
    other_N, other_reference_N = ((-torch.expm1(each)).clamp(min=0) for each in (logp_N, logp_reference_N))
    others_N = torch.xlogy(other_N, other_N) - torch.xlogy(other_N, other_reference_N)
    return logp_N.exp() * (logp_N - logp_reference_N) + others_N


def kl_loss(
    logp_current_N: Tensor, logp_behaviour_N: Tensor, logp_reference_N: Tensor, estimator: Estimator, cap: float | None
) -> Tensor:
    """[N]: a term whose expected gradient over behaviour's tokens is that of the divergence of current from reference.

    The tokens come from behaviour, so the estimator is weighed by w = p_current / p_behaviour, as in DeepSeek-V3.2 (arXiv
    2512.02556, section 3.1). For k1 and k3 the gradient passes through w too: the mean of w k is the divergence, whatever
    current is. k2 is different: its mean is another divergence, but its gradient x dlog p has the right mean when w is held
    fixed (Tang and Munos 2025, arXiv 2506.09477). `cap` truncates w above; None leaves it.
    """
    k_N = estimate(logp_current_N, logp_reference_N, estimator)
    w_N = ratio(logp_current_N, logp_behaviour_N)
    if cap is not None:
        w_N = w_N.clamp(max=cap)
    return (w_N.detach() if estimator == "k2" else w_N) * k_N


def kl_penalty(logp_T: Float32Array, logp_reference_T: Float32Array, estimator: Estimator) -> npt.NDArray[np.float64]:
    """[T]: what each token costs when the divergence is taken from the reward; `estimate` without a gradient."""
    logp, logp_reference = (torch.from_numpy(each.astype(np.float64)) for each in (logp_T, logp_reference_T))
    return estimate(logp, logp_reference, estimator).numpy()
