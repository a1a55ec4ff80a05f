"""Advantages and value targets from a critic when other weights sampled the data: temporal differences are weighed by
truncated ratios, and traces are cut where the policy has moved away.

Axis: N tokens of any number of completions, one after the other; `end_N` is True at the last token of each, and nothing
passes over it, so two completions in one trace are the two apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.record import Float32Array
from async_rlhf.learner.corrections.ratios import MAX_LOG_RATIO

BoolArray = npt.NDArray[np.bool_]


def v_trace(
    reward_N: Float32Array,
    value_N: Float32Array,
    log_ratio_N: Float32Array,
    end_N: BoolArray,
    *,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> tuple[Float32Array, Float32Array]:
    """Advantages and value targets [N].

    With ratio = p_proximal / p_behaviour, rho = min(rho_cap, ratio), c = lam min(c_cap, ratio):
    v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}),  A_t = r_t + gamma v_{t+1} - V_t
    (Espeholt et al. 2018, "IMPALA", arXiv 1802.01561, eq. 1 and section 4.2; remark 2 for lam). The weight rho_t of the policy
    gradient is not in A_t: it is the loss's correction. The fixed point is the value of a policy between behaviour and
    proximal, the latter as rho_cap grows; c_cap sets how fast it is reached.
    """
    ratio_N = _ratio(log_ratio_N)
    rho_N, c_N = np.minimum(rho_cap, ratio_N), lam * np.minimum(c_cap, ratio_N)
    advantage_N, target_N = np.zeros(len(reward_N)), np.zeros(len(reward_N))
    next_value = next_target = 0.0
    for t in reversed(range(len(reward_N))):
        if end_N[t]:
            next_value = next_target = 0.0
        value = float(value_N[t])
        delta = rho_N[t] * (reward_N[t] + gamma * next_value - value)
        target_N[t] = value + delta + gamma * c_N[t] * (next_target - next_value)
        advantage_N[t] = reward_N[t] + gamma * next_target - value
        next_value, next_target = value, target_N[t]
    return advantage_N.astype(np.float32), target_N.astype(np.float32)


def traced(
    reward_N: Float32Array,
    value_N: Float32Array,
    log_ratio_N: Float32Array,
    end_N: BoolArray,
    *,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> tuple[Float32Array, Float32Array]:
    """Advantages and value targets [N]: lambda-returns whose traces are cut.

    A_t = delta_t + gamma lam min(c_cap, ratio_{t+1}) A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and
    return_t = V_t + min(rho_cap, ratio_t) A_t: Retrace(lam) (Munos et al. 2016, arXiv 1606.02647, eq. 4) with the critic's
    value in place of an expectation over actions. On-policy it is generalised advantage estimation; with lam = 1 and equal
    caps its targets are those of V-trace.
    """
    ratio_N = _ratio(log_ratio_N)
    rho_N, c_N = np.minimum(rho_cap, ratio_N), lam * np.minimum(c_cap, ratio_N)
    advantage_N = np.zeros(len(reward_N))
    next_value = trace = 0.0
    for t in reversed(range(len(reward_N))):
        if end_N[t]:
            next_value = trace = 0.0
        value = float(value_N[t])
        advantage_N[t] = reward_N[t] + gamma * next_value - value + gamma * trace
        next_value, trace = value, c_N[t] * advantage_N[t]
    return advantage_N.astype(np.float32), (value_N + rho_N * advantage_N).astype(np.float32)


def _ratio(log_ratio_N: Float32Array) -> npt.NDArray[np.float64]:
    return np.exp(np.clip(log_ratio_N.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
