"""How good a reward model is: how often it prefers what was preferred, and whether its certainty is calibrated. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Pairs whose predicted probability lies in one tenth of [0.5, 1]: the mean prediction, and how often it was right."""

    predicted: float
    right: float
    count: int


@dataclass(frozen=True)
class Quality:
    """accuracy: share of pairs in their order (a tie counts half). loss: mean negative log-likelihood, nats a pair.

    calibration_error: expected calibration error (Guo et al. 2017, equation 3) of the more likely side, in ten bins.
    """

    accuracy: float
    loss: float
    calibration_error: float
    bins: tuple[Bin, ...]
    num_pairs: int


def quality(margins: Sequence[float]) -> Quality:
    """margins: the model's score of the chosen minus that of the rejected, for each pair; at least one."""
    sure = [1 / (1 + math.exp(-min(abs(margin), 700.0))) for margin in margins]
    right = [1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins]
    places: dict[int, list[int]] = {}
    for i, probability in enumerate(sure):
        places.setdefault(min(_BINS - 1, int((probability - 0.5) * 2 * _BINS)), []).append(i)
    bins = tuple(
        Bin(sum(sure[i] for i in found) / len(found), sum(right[i] for i in found) / len(found), len(found))
        for _, found in sorted(places.items())
    )
    return Quality(
        accuracy=sum(right) / len(right),
        loss=sum(max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins) / len(margins),
        calibration_error=sum(b.count * abs(b.predicted - b.right) for b in bins) / len(margins),
        bins=bins,
        num_pairs=len(margins),
    )
