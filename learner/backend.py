"""The seam between the learner's loop and whatever holds the model and takes the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner import diagnostics
from async_rlhf.learner.batch import Row
from async_rlhf.learner.targets import Observation

# What every backend reports of every step; a loss and a critic add their own.
STEP_METRICS = (
    "loss",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "is/weight_mean",
    "is/masked_ratio",
    "is/clamped_ratio",
    *diagnostics.NAMES,
)


@dataclass(frozen=True)
class StepReport:
    """What one learner step did: metrics by name, and the mean ratio proximal / behaviour of each completion."""

    metrics: Mapping[str, Any]
    weight_of_member: Mapping[int, float]
    applied: bool
    """False when an update was refused because its loss or gradient is not finite. Weights and optimizer are then as
    that update found them, and the updates after it were not tried."""

    @classmethod
    def of_nothing(cls) -> StepReport:
        """Of a step without a token to learn from: what would be measured is None, so that its names are always there."""
        return cls(dict.fromkeys(STEP_METRICS), {}, applied=False)


class Backend(Protocol):
    """Owns model, optimizer and schedule. Waits for nothing."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row that holds several completions; 1 where each has a row of its own."""
        ...

    def observe(self, rows: Sequence[Row]) -> Mapping[int, Observation]:
        """Of every completion in `rows`, by its index in the batch, under the weights as they are."""
        ...

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        """One learner step: an optimizer update from each list of rows, in order. `step` counts from 0."""
        ...

    def rehearse(self, updates: Sequence[Sequence[Row]], step: int) -> None:
        """All that `step` does with these updates but the updates: forward, loss, backward, norm, report. Raises what `step`
        would raise. Nothing that a later step or checkpoint depends on is changed, and the gradient is forgotten. As in a step,
        ranks that were given work when one of them raises do not go on."""
        ...

    def tensors(self) -> Mapping[str, RawTensor]:
        """All parameters by name, each once, ready to publish; or the adapters of some (`learner.lora.publish`).

        On a CPU these are views of live memory: they hold until the next `step` or `load`, so copy what must outlive it
        (a weight set does).
        """
        ...

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """A text and its log-probabilities under the weights that `tensors` gives. ids: how it begins; none: any tokens."""
        ...

    def freeze(self) -> Callable[[Path], None]:
        """Begin to save the present state. The writer that comes back may run in another thread while steps go on; it fills
        an existing directory with `model/` (a Hugging Face directory), the optimizer's state and the critic."""
        ...

    def save(self, directory: Path) -> None:
        """Freeze and write at once."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what was saved, by any backend on any number of ranks; on CPU a lone torch rank goes on bit for bit."""
        ...
