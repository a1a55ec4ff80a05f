"""Generalised advantage estimation: a critic's view of each token, for data of the policy that learns."""

from __future__ import annotations

import numpy as np

from async_rlhf.buffers.record import Float32Array


def gae(reward_T: Float32Array, value_T: Float32Array, *, gamma: float, lam: float) -> tuple[Float32Array, Float32Array]:
    """Advantages and returns [T] of one completion.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t, with V = A = 0 after the
    last token (Schulman et al. 2016, arXiv 1506.02438, eq. 16). value_T[t] is the value just before token t.
    """
    advantage_T = np.zeros(len(reward_T))
    value, advantage = 0.0, 0.0
    for t in reversed(range(len(reward_T))):
        delta = reward_T[t] + gamma * value - value_T[t]
        advantage = delta + gamma * lam * advantage
        advantage_T[t], value = advantage, value_T[t]
    return advantage_T.astype(np.float32), (advantage_T + value_T).astype(np.float32)
