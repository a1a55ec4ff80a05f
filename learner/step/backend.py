"""The seam between the learner's loop and whatever holds the model and takes the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from async_rlhf.buffers.protocol.manifest import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.rows import Row
from async_rlhf.learner.objective.estimation import PolicyEvaluation
from async_rlhf.learner.step.report import StepReport


class Backend(Protocol):
    """Owns model, optimizer and schedule. Waits for nothing."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row that holds several completions; 1 where each has a row of its own."""
        ...

    def evaluate(self, rows: Sequence[Row]) -> Mapping[int, PolicyEvaluation]:
        """Of every completion in `rows`, by its index in the batch, under the weights as they are."""
        ...

    def learn_at(self, rate: float) -> None:
        """From the next step on `learner.learning_rate` is this, on all ranks."""
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

        Copies in host memory that is used again: they hold until the next call.
        """
        ...

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """A text and its log-probabilities under the weights that `tensors` gives. ids: how it begins; none: any tokens.

        Raises NonFiniteError when those are no numbers.
        """
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Begin to save the present state. The writer that comes back may run in another thread while steps go on; it fills
        an existing directory with `model/` (a Hugging Face directory), the optimizer's state and the critic."""
        ...

    def save(self, directory: Path) -> None:
        """Take a snapshot and write it at once."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what was saved, by any backend on any number of ranks; on CPU a lone torch rank goes on bit for bit."""
        ...
