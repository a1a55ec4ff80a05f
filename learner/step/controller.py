"""Rank 0 controls the worker ranks: every call of the learner's loop becomes one command that all ranks carry out.

waits for   controller: what its ranks do together, at most `learner.rank_timeout_s`; worker rank: the next command
on close    the worker ranks end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rlhf.buffers.protocol.manifest import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch, Packing
from async_rlhf.learner.batch.partition import Update, partition
from async_rlhf.learner.batch.rows import Row, check_references, check_sampling_masks, check_tokens
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import PolicyEvaluation
from async_rlhf.learner.objective.loss import Counts
from async_rlhf.learner.parallel.ranks import Ranks, Tensors
from async_rlhf.learner.registry import loss_spec
from async_rlhf.learner.step.machine import MachineSettings, make_machine
from async_rlhf.learner.step.report import StepReport
from async_rlhf.learner.step.update import Step


@dataclass(frozen=True)
class RankParts:
    """What every rank is made of: how it makes a step, with which machine, and its place among the ranks."""

    step: Step
    ranks: Ranks


def assemble(
    model_dir: Path,
    config: LearnerConfig,
    loss: LossConfig,
    publish_dtype: str = "float32",
    ranks: Ranks | None = None,
    value_clip: float | None = None,
    reference_recorded: bool = False,
) -> RankParts:
    """reference_recorded: rollouts carry their log-probabilities under the reference, so it is not loaded here."""
    ranks = ranks or Ranks()
    with_reference = loss.needs_reference and not reference_recorded
    settings = MachineSettings(model_dir, config, publish_dtype, with_reference)
    machine = make_machine(settings, ranks)
    # ranks that share rows compute the whole loss each: there is nothing to add up
    adding = ranks if config.ranks_per_row == 1 else Ranks()
    return RankParts(Step(machine, config, loss, adding, value_clip), ranks)


class Controller:
    """A `Backend` made of all ranks; lives on rank 0."""

    def __init__(self, parts: RankParts) -> None:
        self.machine, self._step, self._ranks = parts.step.machine, parts.step, parts.ranks
        loss, config = self._step.loss, self._step.learner
        spec = loss_spec(loss.kind)
        self._ratios = spec.takes_ratios and not loss.allow_uncorrected
        self._packing = Packing(
            config.micro_batch_tokens,
            whole_groups=spec.level == "pair",
            sampling_masks=spec.takes_ratios,
            recorded_references=loss.needs_reference and not self.machine.settings.with_reference,
        )

    @property
    def row_tokens(self) -> int:
        """See `Backend.row_tokens`."""
        return self.machine.config.row_tokens if self.machine.policy.packs else 1

    def evaluate(self, rows: Sequence[Row]) -> Mapping[int, PolicyEvaluation]:
        """See `Backend.evaluate`."""
        (update,) = self._distribute("evaluate", [rows])
        gathered = self._ranks.gather(_packed(self._step.evaluate(update.batches)))
        assert gathered is not None
        return {member: found for each in gathered for member, found in _unpacked(each).items()}

    def learn_at(self, rate: float) -> None:
        """See `Backend.learn_at`. The other ranks get it with each step."""
        self.machine.learn_at(rate)

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        """See `Backend.step`."""
        rate = self.machine.config.learning_rate
        return self._step.train(self._distribute("step", updates, step=step, learning_rate=rate), step)

    def rehearse(self, updates: Sequence[Sequence[Row]], step: int) -> None:
        """See `Backend.rehearse`."""
        self._step.rehearse(self._distribute("rehearse", updates, step=step), step)

    def gradient(self, rows: Sequence[Row], step: int) -> torch.Tensor:
        """float32 [P]: see `Step.gradient`."""
        (update,) = self._distribute("gradient", [rows], step=step)
        return self._step.gradient(update, step)

    def tensors(self) -> Mapping[str, RawTensor]:
        """See `Backend.tensors`."""
        self._together("tensors")
        return self.machine.tensors()

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """See `Backend.canary`."""
        self._together("canary", ids=list(ids))
        return self.machine.canary(ids)

    def snapshot(self) -> Callable[[Path], None]:
        """See `Backend.snapshot`."""
        self._together("snapshot")
        return self.machine.snapshot()

    def save(self, directory: Path) -> None:
        """See `Backend.save`."""
        self.snapshot()(directory)

    def load(self, directory: Path) -> None:
        """See `Backend.load`."""
        self._ranks.command({"do": "load", "directory": str(directory)})
        self.machine.load(directory)

    def close(self) -> None:
        """End the worker ranks."""
        self._ranks.command({"do": "close"})

    def partition(self, updates: Sequence[Sequence[Row]]) -> list[list[Update]]:
        """For each rank its micro-batches of every update.

        Raises RecordError for a token that the model does not have; when the loss takes ratios to a truncated distribution
        that was not recorded; and when a rollout lacks its log-probabilities under a reference that is not loaded here.
        """
        for rows in updates:
            check_tokens(rows, self.machine.policy.vocabulary)
            if self._ratios:
                check_sampling_masks(rows)
            if self._packing.recorded_references:
                check_references(rows)
        together = self._step.learner.ranks_per_row
        parts = partition(updates, self._ranks.size // together, self._packing)
        return [part for part in parts for _ in range(together)]

    def _together(self, name: str, **header: list[int]) -> None:
        if self.machine.collective:
            self._ranks.command({"do": name, **header})

    def _distribute(self, name: str, updates: Sequence[Sequence[Row]], **header: float) -> list[Update]:
        """Send every worker rank its micro-batches; rank 0's own come back."""
        parts = self.partition(updates)
        if self._ranks.size > 1:
            named = [{"counts": list(vars(u.counts).values()), "number": u.number, "batches": len(u.batches)} for u in parts[0]]
            tensors = [[batch.tensors() for update in part for batch in update.batches] for part in parts]
            self._ranks.command({"do": name, "updates": named, **header}, tensors)
        return parts[0]


def make_backend(
    model_dir: Path,
    config: LearnerConfig,
    loss: LossConfig,
    publish_dtype: str = "float32",
    ranks: Ranks | None = None,
    value_clip: float | None = None,
    reference_recorded: bool = False,
) -> Controller:
    """The backend of rank 0; arguments as of `assemble`."""
    return Controller(assemble(model_dir, config, loss, publish_dtype, ranks, value_clip, reference_recorded))


def work(parts: RankParts) -> None:
    """A worker rank: carry out rank 0's commands until `close`. Raises RankLostError when none comes in time."""
    while True:
        header, tensors = parts.ranks.commanded()
        if header["do"] == "close":
            return
        _carry_out(parts, header, tensors)


def _carry_out(parts: RankParts, header: Mapping[str, Any], tensors: Sequence[Tensors]) -> None:
    match header["do"]:
        case "step":
            parts.step.machine.learn_at(header["learning_rate"])
            parts.step.train(_updates(header, tensors), header["step"])
        case "rehearse":
            parts.step.rehearse(_updates(header, tensors), header["step"])
        case "gradient":
            (update,) = _updates(header, tensors)
            parts.step.gradient(update, header["step"])
        case "evaluate":
            parts.ranks.gather(_packed(parts.step.evaluate(_updates(header, tensors)[0].batches)))
        case "load":
            parts.step.machine.load(Path(header["directory"]))
        case "canary":
            parts.step.machine.canary(header["ids"])
        case "tensors":
            parts.step.machine.tensors()
        case "snapshot":
            parts.step.machine.snapshot()


def _updates(header: Mapping[str, Any], tensors: Sequence[Tensors]) -> list[Update]:
    waiting = iter(tensors)
    return [
        Update(
            tuple(MicroBatch.of(next(waiting)) for _ in range(each["batches"])),
            Counts(*each["counts"]),
            each["number"],
        )
        for each in header["updates"]
    ]


def _packed(found: Mapping[int, PolicyEvaluation]) -> dict[str, torch.Tensor]:
    return {
        f"{member}.{name}": torch.from_numpy(np.ascontiguousarray(value))
        for member, each in found.items()
        for name, value in vars(each).items()
        if value is not None
    }


def _unpacked(tensors: Tensors) -> dict[int, PolicyEvaluation]:
    by_member: dict[int, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        member, _, name = key.partition(".")
        by_member.setdefault(int(member), {})[name] = tensor.numpy()
    return {member: PolicyEvaluation(**values) for member, values in by_member.items()}
