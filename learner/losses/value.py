"""What the critic is fitted with."""

from __future__ import annotations

from torch import Tensor


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, clip: float | None) -> Tensor:
    """[N]: max((V - R)^2, (V' - R)^2) / 2, with V' the value held within `clip` of the one at the start of the step.

    PPO's clipped value loss (detail 9 of Huang et al. 2022, "The 37 implementation details of proximal policy optimization").
    None: (V - R)^2 / 2. `value_N` carries the gradient. Per token, to be summed and divided like a token loss.
    """
    plain_N = (value_N - return_N).square()
    if clip is None:
        return plain_N / 2
    held_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    return plain_N.maximum((held_N - return_N).square()) / 2
