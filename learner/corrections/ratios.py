"""Ratios of two policies, of a token and of a completion, finite whatever comes. Pure functions over flat [N] tensors.

Log-ratios are clamped before `exp`, since `where(mask, exp(x), 0)` has NaN gradients at overflow; what is not a number stays
so, and refuses the step. Axes: N tokens of S completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

# e^20 is far beyond any useful weight and far below float32 overflow; 20 is also the clamp of verl.
MAX_LOG_RATIO = 20.0


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
