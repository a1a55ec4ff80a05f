"""How near a gradient is to the true one. Pure, in numpy.

The reference is a mean over many fresh batches, and still noisy: no estimate, however good, has cosine 1 with it.

*Ceiling.* Let a and b be the means of two halves of the reference, of equal size: g plus noises that are independent and of
expected square n. Then r = cos(a, b) estimates |g|^2 / (|g|^2 + n), and the whole, whose noise has the square n / 2, has with g
the cosine sqrt(|g|^2 / (|g|^2 + n / 2)) = sqrt(2 r / (1 + r)): the formula of Spearman (1910) and Brown (1910) for a test of
doubled length. An estimate that *is* g reaches this ceiling and no more.

*Share.* <estimate, reference> / <a, b>: the factors of both products are independent, so that their expectations are free of
noise, and the share is 1 on average for an unbiased estimate, however noisy; 0.5 for one that takes half of every step.

Axes: M fresh batches, P parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Measures(NamedTuple):
    """A gradient beside the reference. share: not a number where the halves of the reference have no common direction."""

    cosine: float
    norm_ratio: float
    share: float


@dataclass(frozen=True)
class FreshGradients:
    """sums_MP: float32 [M, P], of each fresh batch its gradient before the division; counts_M: float64 [M], what it is divided
    by."""

    sums_MP: npt.NDArray[np.float32]
    counts_M: Array

    @cached_property
    def halves(self) -> tuple[float, float]:
        """Cosine of the halves (every other batch), and their inner product, which estimates |g|^2 without bias."""
        one_P, other_P = (self.sums_MP[at::2].sum(0, dtype=np.float64) / self.counts_M[at::2].sum() for at in (0, 1))
        return cosine(one_P, other_P), float(one_P @ other_P)

    @cached_property
    def total_P(self) -> Array:
        return np.asarray(self.sums_MP.sum(0, dtype=np.float64))

    def measure(self, gradient_P: Array) -> Measures:
        return self._beside(self.total_P / self.counts_M.sum(), gradient_P)

    def fresh_batches(self) -> list[Measures]:
        """Every fresh batch beside the rest of the reference: a correction that undoes all staleness reaches as much on
        average. The rest is smaller than the whole by that batch."""
        total = self.counts_M.sum()
        return [
            self._beside((self.total_P - own_P) / (total - count), own_P / max(count, 1.0))
            for own_P, count in zip(self.sums_MP, self.counts_M, strict=True)
        ]

    def _beside(self, mean_P: Array, gradient_P: Array) -> Measures:
        signal, ratio = self.halves[1], float(np.linalg.norm(gradient_P) / np.linalg.norm(mean_P))
        return Measures(cosine(gradient_P, mean_P), ratio, float(gradient_P @ mean_P) / signal if signal > 0 else math.nan)


def cosine(one_P: Array, other_P: Array) -> float:
    """0 where either is 0: a batch whose every term is masked points nowhere."""
    size = float(np.linalg.norm(one_P) * np.linalg.norm(other_P))
    return float(one_P @ other_P) / size if size > 0 else 0.0


def ceiling(r: float) -> float:
    """The greatest cosine with a reference whose halves have cosine r that an estimate can be expected to have: see the module
    docstring. 0 where r is not positive: such a reference shows no direction."""
    return math.sqrt(2 * r / (1 + r)) if r > 0 else 0.0
