"""What every backend shares: one rank's part of a step, and the whole of it for a rank that is alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buffers.tensors import RawTensor
from buffers.wire import Canary
from learner.backend import StepReport
from learner.batch import MicroBatch, Row
from learner.config import LearnerConfig, LossConfig
from learner.kinds import KINDS
from learner.ranks import Ranks
from learner.share import Update, shares
from learner.targets import Observation
from learner.update import Step


class RankBackend(ABC):
    """One rank of a backend. Alone it is a whole `Backend`; among others it is led (see `learner/lead.py`).

    What is abstract is called on all ranks at once where `collective` is True, else on rank 0 only; `train`,
    `observe_part` and `load` always on all.
    """

    collective = False

    def __init__(self, config: LearnerConfig, loss: LossConfig, ranks: Ranks) -> None:
        self._config, self._loss_config, self._ranks = config, loss, ranks

    def cut(self, updates: Sequence[Sequence[Row]], ranks: int) -> list[list[Update]]:
        """For each of so many ranks its micro-batches of every update."""
        whole_groups = KINDS[self._loss_config.kind].level == "pair"
        return shares(updates, ranks, self._config.micro_batch_tokens, whole_groups=whole_groups)

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        """See `Backend.step`."""
        return self.train(self.cut(updates, 1)[0], step)

    def observe(self, rows: Sequence[Row]) -> Mapping[int, Observation]:
        """See `Backend.observe`."""
        (update,) = self.cut([rows], 1)[0]
        return self.observe_part(update.batches)

    def save(self, directory: Path) -> None:
        """See `Backend.save`."""
        self.freeze()(directory)

    def train(self, updates: Sequence[Update], step: int) -> StepReport:
        """This rank's part of a learner step; the report of rank 0 is of all."""
        return self._step().train(updates, step)

    def observe_part(self, batches: Sequence[MicroBatch]) -> dict[int, Observation]:
        """Of the completions in this rank's micro-batches."""
        return self._step().observe(batches)

    @abstractmethod
    def _step(self) -> Step: ...

    @abstractmethod
    def tensors(self) -> Mapping[str, RawTensor]: ...

    @abstractmethod
    def canary(self) -> Canary: ...

    @abstractmethod
    def freeze(self) -> Callable[[Path], None]: ...

    @abstractmethod
    def load(self, directory: Path) -> None: ...
