"""What goes into a loss and what comes out. Axis: N loss-bearing tokens of one micro-batch.

A loss returns the *sum* over its tokens; the backend divides by the token count of the whole update, so a gradient does
not depend on how the batch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from learner.config import LossConfig


@dataclass(frozen=True)
class LossInputs:
    """All float32 [N]; only `logp_current_N` carries a gradient."""

    logp_current_N: Tensor
    logp_proximal_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor


@dataclass(frozen=True)
class LossOutputs:
    """`total` is the scalar sum over tokens; `sums` are sums over tokens, to be divided by N for a mean."""

    total: Tensor
    sums: Mapping[str, Tensor]


class Loss(Protocol):
    def __call__(self, inputs: LossInputs, config: LossConfig) -> LossOutputs: ...
