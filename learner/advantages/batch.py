"""What a completion is worth compared with the whole batch, and numbers brought to one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from async_rlhf.buffers.composition import EPSILON
from async_rlhf.buffers.record import Float32Array


def reinforce_pp(groups: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """A_i = (r_i - mean) / std over all completions of the batch that count.

    REINFORCE++ (Hu 2025, arXiv 2501.03262, eq. 5). A prompt's difficulty stays in the advantage, and no group can
    blow up by a tiny standard deviation of its own. A constant batch has advantage 0. None stays None.
    """
    counting = [reward for group in groups for reward in group if reward is not None]
    if not counting:
        return [[None for _ in group] for group in groups]
    mean = math.fsum(counting) / len(counting)
    std = math.hypot(*(reward - mean for reward in counting)) / math.sqrt(len(counting))
    scale = math.inf if std < EPSILON else std
    return [[None if reward is None else (reward - mean) / scale for reward in group] for group in groups]


def normalised(advantage_N: Float32Array) -> Float32Array:
    """[N]: mean 0 and standard deviation 1 over all tokens; only the mean is taken off what is constant."""
    centred = advantage_N.astype(np.float64) - advantage_N.mean(dtype=np.float64)
    std = float(np.sqrt(np.mean(centred**2)))
    scaled: Float32Array = (centred / std if std >= EPSILON else centred).astype(np.float32)
    return scaled
