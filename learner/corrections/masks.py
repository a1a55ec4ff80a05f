"""Trust masks: what is too far from the policy to learn from. True is kept. They carry no gradient.

A masked token leaves the numerator of a loss and stays in its denominator, so that a mask never raises the learning rate of
what is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.corrections.ratios import MAX_LOG_RATIO, ratio, sequence_log_ratio


def token_mask(logp_proximal_N: Tensor, logp_behaviour_N: Tensor, low: float, high: float) -> Tensor:
    """bool [N]: low <= p_proximal / p_behaviour <= high, per token.

    The two-sided mask of IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855): together with an importance weight
    that is not truncated below `high`, it is its calibration function.
    """
    r_N = ratio(logp_proximal_N.detach(), logp_behaviour_N)
    return (r_N >= low) & (r_N <= high)


def sequence_mask(
    logp_proximal_N: Tensor, logp_behaviour_N: Tensor, sequence_N: Tensor, low: float, high: float, *, geometric: bool
) -> Tensor:
    """bool [N], equal along a completion: low <= its ratio <= high."""
    r_S = sequence_log_ratio(logp_proximal_N.detach(), logp_behaviour_N, sequence_N, mean=geometric).exp()
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


def second_moment_mask(log_ratio_N: Float32Array, limit: float) -> npt.NDArray[np.bool_]:
    """bool [N]: the largest set of tokens, smallest |log-ratio| first, whose mean squared log-ratio is at most `limit`.

    M2PO (Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161). Over the whole batch: the mean of a part says
    nothing about the whole. Log-ratios are proximal / behaviour, where the paper has current / behaviour: the same in the first
    update of a step, and in later ones the clip around the proximal policy limits the rest. One that is not a number is kept,
    so that the step is refused.
    """
    squares = np.minimum(np.abs(log_ratio_N.astype(np.float64)), MAX_LOG_RATIO) ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(order) + 1)
    kept = np.zeros(len(order), np.bool_)
    kept[order[: int(np.sum(means <= limit))]] = True
    return kept | np.isnan(log_ratio_N)
