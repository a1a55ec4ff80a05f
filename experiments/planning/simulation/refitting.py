"""Constants with which the simulation of a run comes as near to its measured speed as can be, and constants by least squares.

Stages that were measured within a run are off by what is not modelled (caches that roles share, interpreters, other processes).
A factor for each kind of stage takes that up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from async_rlhf.experiments.planning.simulation.run import simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Terms, Workload

KINDS = ("generation", "training", "publication", "scoring")
_DIFFERENCE, _FARTHEST = 0.03, 1.0  # of logarithms of factors: for a slope, and in one step
_DAMPING, _HIGHEST = 0.01, 100.0
_SMALL, _ENOUGH = 1e-10, 0.99  # a sum of squares that is none, and one that is hardly less than the one before
_STEPS = 40

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Observed:
    """A run that was made: its completions a second, and the share of its time in which the learner waited.

    Without the second a run that waits for its actors cannot be distinguished from one that waits for its learner.
    """

    workload: Workload
    samples_per_s: float
    learner_idle: float


def refit(costs: Costs, observed: Observed) -> dict[str, float]:
    """By kind of stage, the factors with the least sum of log²(simulated / measured) of the speed and of the squared difference
    of the idle share; `scaled` applies them.

    By Levenberg and Marquardt (Marquardt, An Algorithm for Least-Squares Estimation of Nonlinear Parameters, SIAM 11(2), 1963)
    in logarithms of the factors, with differences over a few per cent: where another role begins to bound a run, its speed has
    no derivative.
    """

    def errors(at: Array) -> Array:
        """Logarithm of simulated over measured speed; difference of the idle shares."""
        run = simulate(*scaled(observed.workload, costs, dict(zip(KINDS, np.exp(at).tolist(), strict=True))), steps=_STEPS)
        speed = math.log(run.samples_per_s / observed.samples_per_s)
        return np.array([speed, run.roles["learner"].idle - observed.learner_idle])

    best, damping, enough = np.zeros(len(KINDS)), _DAMPING, False
    left = errors(best)
    while not enough and damping < _HIGHEST:
        slopes = np.stack([(errors(best + move) - left) / _DIFFERENCE for move in _DIFFERENCE * np.eye(len(KINDS))], axis=1)
        found, tried = left, best
        while damping < _HIGHEST and found @ found >= left @ left > _SMALL:
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(KINDS)), -slopes.T @ left)
            tried = best + np.clip(step, -_FARTHEST, _FARTHEST)
            found, damping = errors(tried), damping * 4
        enough = bool(found @ found > _ENOUGH * (left @ left) or found @ found <= _SMALL)
        if found @ found < left @ left:
            best, left, damping = tried, found, damping / 16
    return dict(zip(KINDS, np.exp(best).tolist(), strict=True))


def scaled(workload: Workload, costs: Costs, factors: Mapping[str, float]) -> tuple[Workload, Costs]:
    """The constants of each kind of stage times its factor; those of scoring are the workload's."""
    generation, training, publication, scoring = (factors[kind] for kind in KINDS)

    def times(terms: Terms, factor: float) -> Terms:
        first, second, third = terms
        return first * factor, second * factor, third * factor

    return replace(workload, reward_s=[seconds * scoring for seconds in workload.reward_s]), Costs(
        decode=times(costs.decode, generation),
        prefill=times(costs.prefill, generation),
        training=times(costs.training, training),
        copy_s=costs.copy_s * publication,
        travel_s=costs.travel_s * publication,
        adopt_s=costs.adopt_s * publication,
    )


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The constants c >= 0 with the least sum of (row · c - seconds)², which keeps the mean of points that scatter: none is
    negative, for no part of a stage gives time back.

    Some of the constants are 0 in the solution and the others are their unconstrained optimum (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23): with a few columns every choice of them is tried.
    """
    matrix, target = np.asarray(rows, float), np.asarray(seconds, float)
    best, least = np.zeros(matrix.shape[1]), np.inf
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            found = np.zeros(matrix.shape[1])
            found[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            loss = float(np.sum((matrix @ found - target) ** 2))
            if found.min() >= 0 and loss < least:
                best, least = found, loss
    return tuple(best.tolist())
