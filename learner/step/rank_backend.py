"""What every backend shares: one rank's part of a step, and the whole of it for a rank that is alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.batch.partition import Update, shares
from async_rlhf.learner.batch.rows import Row, check_references, check_supports, check_tokens
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.objective.estimation import Observation
from async_rlhf.learner.parallel.ranks import Ranks
from async_rlhf.learner.registry import KINDS
from async_rlhf.learner.step.report import StepReport
from async_rlhf.learner.step.update import Step

# Enough that a wrong tensor anywhere shows, few enough to cost nothing beside a step.
_PROBE_TOKENS = 128


class RankBackend(ABC):
    """One rank of a backend. Alone it is a whole `Backend`; among others it is led (see `learner/step/controller.py`).

    What is abstract is called on all ranks at once where `collective` is True, else on rank 0 only; `train`,
    `rehearse_part`, `observe_part` and `load` always on all.
    """

    collective = False
    _policy: Policy

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        loss: LossConfig,
        publish_dtype: str = "float32",
        ranks: Ranks | None = None,
        value_clip: float | None = None,
        reference_recorded: bool = False,
    ) -> None:
        """reference_recorded: rollouts carry their log-probabilities under the reference, so it is not loaded here."""
        torch.set_num_threads(config.threads)
        self._model_dir, self._config, self._loss_config, self._ranks = model_dir, config, loss, ranks or Ranks()
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)  # what the engines serve
        self.device = find_device(config.device, self._ranks.rank)
        self._value_clip = value_clip
        self._reference_recorded = loss.needs_reference and reference_recorded
        self._reference: Policy | None = None

    def _load_reference(self) -> None:
        """The frozen model that divergences are measured from, where the loss wants one and no actor has asked it."""
        if self._loss_config.needs_reference and not self._reference_recorded:
            self._reference = Policy(load_model(self._model_dir, self.device).requires_grad_(False), self._config)
            self._reference.packs = self._policy.packs

    @property
    def row_tokens(self) -> int:
        """See `Backend.row_tokens`."""
        return self._config.row_tokens if self._policy.packs else 1

    def cut(self, updates: Sequence[Sequence[Row]], ranks: int) -> list[list[Update]]:
        """For each of so many ranks its micro-batches of every update.

        Raises RecordError for a token that the model does not have; when the loss takes ratios to a truncated distribution
        that was not recorded; and when a rollout lacks what the reference says of it and no reference is loaded here.
        """
        kind = KINDS[self._loss_config.kind]
        for rows in updates:
            check_tokens(rows, self._policy.vocabulary)
        if kind.takes_ratios and not self._loss_config.allow_uncorrected:
            for rows in updates:
                check_supports(rows)
        if self._reference_recorded:
            for rows in updates:
                check_references(rows)
        tokens, together = self._config.micro_batch_tokens, self._config.ranks_per_row
        parts = shares(
            updates,
            ranks // together,
            tokens,
            whole_groups=kind.level == "pair",
            with_sampling_masks=kind.takes_ratios,
            with_references=self._reference_recorded,
        )
        return [part for part in parts for _ in range(together)]

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        """See `Backend.step`."""
        return self.train(self.cut(updates, 1)[0], step)

    def rehearse(self, updates: Sequence[Sequence[Row]], step: int) -> None:
        """See `Backend.rehearse`."""
        self.rehearse_part(self.cut(updates, 1)[0], step)

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

    def rehearse_part(self, updates: Sequence[Update], step: int) -> None:
        """This rank's part of a step that is not made."""
        self._step().rehearse(updates, step)

    def observe_part(self, batches: Sequence[MicroBatch]) -> dict[int, Observation]:
        """Of the completions in this rank's micro-batches."""
        return self._step().observe(batches)

    def _step(self) -> Step:
        # ranks that share rows compute the whole loss each: there is nothing to add up
        ranks = self._ranks if self._config.ranks_per_row == 1 else Ranks()
        return Step(self, self._config, self._loss_config, ranks, self._value_clip)

    def reference(self, batch: MicroBatch) -> Tensor | None:
        """See `Machine.reference`."""
        return None if self._reference is None else self._reference(batch)[0]

    @abstractmethod
    def predict(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]: ...

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None: ...

    @abstractmethod
    def apply(self, step: int, finite: bool) -> tuple[float, bool]: ...

    @abstractmethod
    def tensors(self) -> Mapping[str, RawTensor]: ...

    @abstractmethod
    def canary(self, ids: Sequence[int] = ()) -> Canary: ...

    @abstractmethod
    def freeze(self) -> Callable[[Path], None]: ...

    @abstractmethod
    def load(self, directory: Path) -> None: ...


def find_device(name: str, rank: int = 0) -> torch.device:
    """The device of this rank: `cuda` is one per rank. Raises ConfigError when it cannot be used."""
    try:
        device = torch.device(f"cuda:{rank}" if name == "cuda" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"learner.device = {name!r} cannot be used: {error}; use 'cpu'") from error
    return device


def probe(policy: Policy, device: torch.device, ids: Sequence[int]) -> Canary:
    """The beginning of a text, or without one any tokens, with the log-probabilities under the present weights."""
    text = np.array(ids[:_PROBE_TOKENS], np.int64)
    if len(text) < 2:
        text = np.random.default_rng(0).integers(policy.vocabulary, size=_PROBE_TOKENS // 4)
    return Canary(ids=text.tolist(), logprobs=policy.probe(torch.from_numpy(text).to(device)).tolist())


def raw(tensor: torch.Tensor) -> RawTensor:
    """Its row-major bytes: a view where it lies in CPU memory already."""
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
