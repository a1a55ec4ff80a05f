"""Constants of a system, chosen so that predictions meet published figures: least squares of their logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

_POINTS = 7
_ROUNDS = 7


def fit(ratios: Callable[[Sequence[float]], Iterable[float]], bounds: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """ratios: predicted over published, for given constants; bounds: of each constant, above 0.

    A grid of logarithms that is laid ever closer around its best point: each round has half of the last one's width.
    """

    def loss(point: Iterable[float]) -> float:
        return sum(math.log(ratio) ** 2 for ratio in ratios(constants(point)))

    def constants(point: Iterable[float]) -> tuple[float, ...]:
        # The exponential of a logarithm may lie a last bit beyond the bound.
        return tuple(min(max(math.exp(value), low), high) for value, (low, high) in zip(point, bounds, strict=True))

    edges = [(math.log(low), math.log(high)) for low, high in bounds]
    spans, best = list(edges), [(low + high) / 2 for low, high in edges]
    for _ in range(_ROUNDS):
        axes = [[low + (high - low) * step / (_POINTS - 1) for step in range(_POINTS)] for low, high in spans]
        best = list(min(product(*axes), key=loss))
        spans = [
            (max(least, value - (high - low) / 4), min(most, value + (high - low) / 4))
            for value, (low, high), (least, most) in zip(best, spans, edges, strict=True)
        ]
    return constants(best)
