"""How near a gradient estimate is to the true gradient, from inner products alone. Pure, in numpy.

The reference is a mean over many fresh completions, and still noisy: no estimate, however good, has cosine 1 with it. Both it
and the estimate are sums over independent parts (blocks of fresh groups; groups of the batch), so all that is asked here, and
every jackknife replicate of it, follows from the inner products of those parts: P numbers a part are looked at once, nothing is
projected and nothing approximated.

*Ceiling.* Let a and b be the means of two halves of the reference, of equal size: g plus noises that are independent and of
expected square n. Then r = cos(a, b) estimates |g|^2 / (|g|^2 + n), and the whole, whose noise has the square n / 2, has with g
the cosine sqrt(|g|^2 / (|g|^2 + n / 2)) = sqrt(2 r / (1 + r)): the formula of Spearman (1910) and Brown (1910) for a test of
doubled length. An estimate that *is* g reaches this ceiling and no more.

*Share.* <estimate, reference> / <a, b>: the factors of both products are independent, so that their expectations are free of
noise, and the share is 1 on average for an unbiased estimate, however noisy; 0.5 for one that takes half of every step.

*Intervals.* A jackknife over the groups of the estimate and one over the blocks of the reference, whose variances add (Efron
and Stein 1981, "The jackknife estimate of variance"). Not the bootstrap: a resample repeats parts, which doubles the noise in
the norm of a mean, so that its cosines lie too low.

Axes: K parts of an estimate, B blocks of the reference, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from async_rlhf.experiments.statistics import Difference, t_interval

Array = npt.NDArray[np.float64]
# Columns whose products are made in float64 at a time: a copy of all of them would need twice the memory.
_COLUMNS = 1 << 17


@dataclass(frozen=True)
class Sums:
    """A gradient in parts. sums_KP: float32 [K, P], of each part its gradient before the division; counts_K: float64 [K], what
    it is divided by."""

    sums_KP: npt.NDArray[np.float32]
    counts_K: Array

    def whole(self) -> Array:
        """float64 [P]"""
        return np.asarray(self.sums_KP.sum(0, dtype=np.float64) / self.counts_K.sum())


@dataclass(frozen=True)
class Reference:
    """blocks_BB: float64 [B, B], inner products of the blocks' sums; counts_B: float64 [B]."""

    blocks_BB: Array
    counts_B: Array

    @classmethod
    def of(cls, sums: Sums) -> Reference:
        return cls(products(sums.sums_KP, sums.sums_KP), sums.counts_K)

    def square(self, weights_B: Array) -> float:
        """Of the norm of the mean."""
        return float(weights_B @ self.blocks_BB @ weights_B) / float(weights_B @ self.counts_B) ** 2

    def halves(self, weights_B: Array) -> tuple[float, float]:
        """Cosine of the halves (every other block), and their inner product, which estimates |g|^2 without bias."""
        even_B = np.arange(len(weights_B)) % 2 == 0
        one_B, other_B = weights_B * even_B, weights_B * ~even_B
        inner = float(one_B @ self.blocks_BB @ other_B) / float((one_B @ self.counts_B) * (other_B @ self.counts_B))
        size = math.sqrt(self.square(one_B) * self.square(other_B))
        return inner / size if size > 0 else 0.0, inner

    def ceiling(self, weights_B: Array) -> float:
        return ceiling(self.halves(weights_B)[0])


@dataclass(frozen=True)
class Estimate:
    """An estimate beside the reference. own_KK, cross_KB: float64, inner products of its parts with each other and with the
    blocks; counts_K: float64 [K]."""

    reference: Reference
    own_KK: Array
    cross_KB: Array
    counts_K: Array

    @classmethod
    def of(cls, sums: Sums, reference: Reference, blocks_BP: npt.NDArray[np.float32]) -> Estimate:
        own_KK, cross_KB = products(sums.sums_KP, sums.sums_KP), products(sums.sums_KP, blocks_BP)
        return cls(reference, own_KK, cross_KB, sums.counts_K)

    def inner(self, weights_K: Array, weights_B: Array) -> float:
        counts = float((weights_K @ self.counts_K) * (weights_B @ self.reference.counts_B))
        return float(weights_K @ self.cross_KB @ weights_B) / counts

    def square(self, weights_K: Array) -> float:
        return float(weights_K @ self.own_KK @ weights_K) / float(weights_K @ self.counts_K) ** 2

    def cosine(self, weights_K: Array, weights_B: Array) -> float:
        """0 for an estimate that is 0: a batch whose every term is masked points nowhere."""
        size = math.sqrt(self.square(weights_K) * self.reference.square(weights_B))
        return self.inner(weights_K, weights_B) / size if size > 0 else 0.0

    def norm_ratio(self, weights_K: Array, weights_B: Array) -> float:
        return math.sqrt(self.square(weights_K) / self.reference.square(weights_B))

    def share(self, weights_K: Array, weights_B: Array) -> float:
        """See the module docstring; not a number where the halves of the reference have no common direction."""
        _, signal = self.reference.halves(weights_B)
        return self.inner(weights_K, weights_B) / signal if signal > 0 else math.nan


def ceiling(r: float) -> float:
    """The greatest cosine with a reference whose halves have cosine r that an estimate can be expected to have: see the module
    docstring. 0 where r is not positive: such a reference shows no direction."""
    return math.sqrt(2 * r / (1 + r)) if r > 0 else 0.0


def products(one_KP: npt.NDArray[np.float32], other_LP: npt.NDArray[np.float32]) -> Array:
    """float64 [K, L]: inner products, added up in float64."""
    found_KL = np.zeros((len(one_KP), len(other_LP)))
    for at in range(0, one_KP.shape[1], _COLUMNS):
        cut = slice(at, at + _COLUMNS)
        found_KL += one_KP[:, cut].astype(np.float64) @ other_LP[:, cut].astype(np.float64).T
    return found_KL


def jackknife(measure: Callable[[Array, Array], float], num_parts: int, num_blocks: int) -> Difference:
    """A measure of an estimate with its 95 % interval, and p against 0. measure: of weights [K] and [B], which are 1 for what
    counts and 0 for what is left out. Degrees of freedom: of the fewer. `count` of what comes back is K; p is None where a
    value is not a number.

    Raises ValueError for fewer than two parts or four blocks (a half of one block cannot lose one).
    """
    if num_parts < 2 or num_blocks < 4:
        raise ValueError(f"{num_parts} parts and {num_blocks} blocks: at least 2 and 4 are needed")
    all_K, all_B = np.ones(num_parts), np.ones(num_blocks)
    found = measure(all_K, all_B)
    variance = _spread([measure(left_K, all_B) for left_K in all_K - np.eye(num_parts)])
    variance += _spread([measure(all_K, left_B) for left_B in all_B - np.eye(num_blocks)])
    if not math.isfinite(found + variance):  # somewhere the reference has no direction
        return Difference(found, math.nan, math.nan, num_parts, None)
    return t_interval(found, math.sqrt(variance), min(num_parts, num_blocks) - 1, num_parts)


def between(measure: Callable[[Estimate, Array, Array], float], one: Estimate, other: Estimate) -> Difference:
    """A measure of `one` minus that of `other`, of the same groups and the same reference: their common noise falls out."""
    return jackknife(
        lambda weights_K, weights_B: measure(one, weights_K, weights_B) - measure(other, weights_K, weights_B),
        len(one.counts_K),
        len(one.reference.counts_B),
    )


def fresh_batches(reference: Reference, blocks_a_batch: int) -> list[tuple[float, float, float]]:
    """Cosine, norm ratio and share of every fresh batch, each of so many blocks, against the rest of the reference: what a
    correction that undoes all staleness reaches on average. The rest is smaller than the whole by that batch."""
    num_blocks = len(reference.counts_B)
    found = []
    for first in range(0, num_blocks - blocks_a_batch + 1, blocks_a_batch):
        own = np.arange(first, first + blocks_a_batch)
        batch = Estimate(reference, reference.blocks_BB[np.ix_(own, own)], reference.blocks_BB[own], reference.counts_B[own])
        rest_B, own_K = np.ones(num_blocks), np.ones(blocks_a_batch)
        rest_B[own] = 0.0
        _, signal = reference.halves(np.ones(num_blocks))
        share = batch.inner(own_K, rest_B) / signal if signal > 0 else math.nan
        found.append((batch.cosine(own_K, rest_B), batch.norm_ratio(own_K, rest_B), share))
    return found


def _spread(left_out: Sequence[float]) -> float:
    """The jackknife's variance from the values with one part left out each."""
    values = np.asarray(left_out)
    return float((len(values) - 1) * values.var())
