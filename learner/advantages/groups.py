"""What a completion is worth compared with its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_rlhf.buffers.composition import EPSILON


def group_relative(rewards: Sequence[float | None], *, scale_by_std: bool) -> list[float | None]:
    """A_i = r_i - mean(r), divided by std(r) when asked; mean and (population) std over the members that count.

    Group-relative advantages of GRPO (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, section 4.1.2); without the
    division it is the form of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). None stays None. A group that is constant,
    or in which fewer than two members count, has advantage 0: it says nothing about which completion is better.
    """
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(counting) / len(counting)
    std = math.hypot(*(reward - mean for reward in counting)) / math.sqrt(len(counting))  # squares could overflow
    if std < EPSILON:
        return [None if reward is None else 0.0 for reward in rewards]
    scale = std if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """A_i = r_i - mean of the others' rewards, over the members that count.

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740, eq. 5): the baseline of a completion does not contain
    its own reward, so the gradient is unbiased. None stays None; a member without siblings that count has advantage 0.
    """
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(counting) / len(counting)
    scale = len(counting) / (len(counting) - 1)  # r_i - (sum - r_i) / (n - 1) = n / (n - 1) (r_i - mean)
    return [None if reward is None else scale * (reward - mean) for reward in rewards]
