"""The policy at the start of the step, found without a forward pass of its own."""

from __future__ import annotations

from torch import Tensor


def interpolated(logp_current_N: Tensor, logp_behaviour_N: Tensor, staleness_N: Tensor) -> Tensor:
    """[N], no gradient: log p_behaviour + (a - 1) / a (log p_current - log p_behaviour), with a the token's staleness.

    Log-linear in versions, as AReaL's `loglinear`: the proximal policy is taken to be the one a version before the
    current, so of the a versions between behaviour and current it has come a - 1. Per token, hence per version span: a
    completion written by several versions has several. At staleness 0 and 1 it is the behaviour policy itself.
    """
    age_N = staleness_N.abs().clamp(min=1).to(logp_current_N.dtype)
    return logp_behaviour_N + (age_N - 1) / age_N * (logp_current_N.detach() - logp_behaviour_N)
