"""What the stages of a run cost on one machine: what a simulation asks, and constants that were fitted to measurements.

    decode_s     a decode step, one token for each row:  c0 + c1 · rows + c2 · rows · context
    prefill_s    prompts that begin together:            c0 + c1 · prompts + c2 · prompts · tokens
    training_s   the updates of a step:                  c0 + c1 · updates + c2 · tokens, a shared prompt counted once

All are linear in their constants, so least squares finds them; none is negative, for no part of a stage gives time back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from async_rlhf.buffers.errors import ConfigError

Terms = tuple[float, float, float]


class StageCosts(Protocol):
    """Seconds of each stage, were its role alone on its cores or devices.

    completion_s: of an actor's thread, for each completion that ends (its text, its scores, its record). copy_s: for which the
    learner stands still to begin a publication. travel_s: from then until the hub has the weights whole; training goes on
    meanwhile. adopt_s: for which an actor's decoding stands still.
    """

    @property
    def completion_s(self) -> float: ...

    @property
    def copy_s(self) -> float: ...

    @property
    def travel_s(self) -> float: ...

    @property
    def adopt_s(self) -> float: ...

    def decode_s(self, rows: int, context: float) -> float:
        """A decode step of `rows` rows with a mean of `context` tokens; linear in the context."""
        ...

    def prefill_s(self, prompts: int, tokens: int) -> float: ...

    def training_s(self, prompts: int, prompt_tokens: int, completion_tokens: int, updates: int) -> float:
        """A step over `prompts` prompts of `prompt_tokens` each, and so many tokens of all their completions."""
        ...


class Costs(BaseModel):
    """`StageCosts` by constants; the module docstring has what each is multiplied by. Seconds, 0 or more."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    decode: Terms
    prefill: Terms = (0.0, 0.0, 0.0)
    training: Terms
    completion_s: float = Field(default=0.0, ge=0)
    copy_s: float = Field(default=0.0, ge=0)
    travel_s: float = Field(default=0.0, ge=0)
    adopt_s: float = Field(default=0.0, ge=0)

    def model_post_init(self, context: object) -> None:
        for name in ("decode", "prefill", "training"):
            if min(getattr(self, name)) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: seconds, 0 or more")

    def decode_s(self, rows: int, context: float) -> float:
        step, row, token = self.decode
        return step + rows * (row + token * context)

    def prefill_s(self, prompts: int, tokens: int) -> float:
        call, prompt, token = self.prefill
        return call + prompts * (prompt + token * tokens)

    def training_s(self, prompts: int, prompt_tokens: int, completion_tokens: int, updates: int) -> float:
        step, update, token = self.training
        return step + updates * update + token * (prompts * prompt_tokens + completion_tokens)


class Fit(BaseModel):
    """constants: none negative. error: median of |fitted - measured| / measured over the points; worst: the largest of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    constants: tuple[float, ...]
    points: int
    error: float
    worst: float

    @property
    def terms(self) -> Terms:
        first, second, third = self.constants
        return first, second, third


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], *, relative: bool = True) -> Fit:
    """The constants c >= 0 with the least sum of ((row · c - seconds) / scale)², over points of positive seconds.

    relative: scale is the point's seconds, so that short stages count as much as long ones; it suits points that were measured
    alone. Else it is 1, which keeps the mean of points that scatter. Some of the constants are 0 in the solution and the others
    are their unconstrained optimum (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23): with a few columns
    every choice of them is tried. Raises ConfigError where there are no points.
    """
    if not len(rows) or len(rows) != len(seconds):
        raise ConfigError(f"nothing to fit: {len(rows)} points with {len(seconds)} durations")
    if not min(seconds) > 0:
        raise ConfigError(f"a duration of {min(seconds)} s cannot be fitted: above 0")
    measured = np.asarray(seconds, float)
    scale = measured if relative else np.ones_like(measured)
    matrix, target = np.asarray(rows, float) / scale[:, None], measured / scale
    best, least = np.zeros(matrix.shape[1]), np.inf
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            found = np.zeros(matrix.shape[1])
            found[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            loss = float(np.sum((matrix @ found - target) ** 2))
            if found.min() >= 0 and loss < least:
                best, least = found, loss
    errors = np.abs((matrix @ best - target) * scale / measured)
    return Fit(constants=tuple(best.tolist()), points=len(measured), error=float(np.median(errors)), worst=float(errors.max()))
