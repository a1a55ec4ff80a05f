"""KL divergence of the policy from a frozen reference, estimated from sampled tokens. Axis: N tokens.

With x = log p_current - log p_reference of a token sampled from p_current, three estimators have the divergence, or nearly, as
their mean (Schulman 2020, "Approximating KL divergence"): k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.objective.corrections import MAX_LOG_RATIO, log_ratio, ratio

Estimator = Literal["k1", "k2", "k3"]


def estimate(logp_N: Tensor, logp_reference_N: Tensor, estimator: Estimator) -> Tensor:
    """[N]: the estimator of each token."""
    x_N = log_ratio(logp_N, logp_reference_N)
    if estimator == "k1":
        return x_N
    if estimator == "k2":
        return x_N.square() / 2
    return (-x_N).exp() - 1 + x_N


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
    x_T = np.clip(logp_T.astype(np.float64) - logp_reference_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return x_T
    return x_T**2 / 2 if estimator == "k2" else np.exp(-x_T) - 1 + x_T
