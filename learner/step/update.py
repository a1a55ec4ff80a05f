"""One learner step as every backend makes it: log-probabilities, loss, backward, the sums that are reported.

What differs between torch and DeepSpeed is behind `Machine`. The proximal policy is the one before the first update; where it
must be known beforehand (a later update, a second pass), it is computed before any weight moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.errors import NonFiniteError
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.batch.partition import Update
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.critic import value_loss
from async_rlhf.learner.objective.estimation import PolicyEvaluation
from async_rlhf.learner.objective.loss import LossInputs, denominator
from async_rlhf.learner.objective.objective import objective
from async_rlhf.learner.parallel.ranks import Ranks
from async_rlhf.learner.step.machine import Machine
from async_rlhf.learner.step.report import StepReport, StepSums


@dataclass(frozen=True)
class Step:
    """How every step of a run is made."""

    machine: Machine
    learner: LearnerConfig
    loss: LossConfig
    ranks: Ranks
    value_clip: float | None = None
    applies: bool = True
    """False: updates are computed and not made."""

    def evaluate(self, batches: Sequence[MicroBatch]) -> dict[int, PolicyEvaluation]:
        """Of every completion in this rank's micro-batches, by its index in the batch."""
        found: dict[int, PolicyEvaluation] = {}
        with torch.no_grad():
            for batch in self._placed(batches):
                proximal_N, _, value_N = self.machine.predict(batch)
                named = {"logp_proximal": proximal_N, "logp_reference": self._reference(batch), "value": value_N}
                arrays = {name: each.float().numpy(force=True) for name, each in named.items() if each is not None}
                owner_N = batch.member_N.numpy(force=True)
                for member in np.unique(owner_N).tolist():
                    found[member] = PolicyEvaluation(**{name: array[owner_N == member] for name, array in arrays.items()})
        return found

    def train(self, updates: Sequence[Update], step: int) -> StepReport:
        """This rank's part of a learner step; rank 0's report is of all ranks, the others' of nothing."""
        sums = StepSums(interpolates=self.loss.proximal == "interpolate")
        proximal = self._proximal(updates)
        applied = all(self._update(update, proximal.get(update.number), step, sums) for update in updates)
        return sums.report(self.ranks, applied, self.loss.is_cap)

    def rehearse(self, updates: Sequence[Update], step: int) -> None:
        """All of `train` but the updates, which are refused as those are whose gradient is not finite."""
        replace(self, applies=False).train(updates, step)
        self.machine.begin()

    def gradient(self, update: Update, step: int) -> Tensor:
        """float32 [P]: what an update would be made from, over all ranks and before it is clipped; see `Machine.gradient`. The
        policy at the start of the step is the present one; nothing is changed. Raises NonFiniteError."""
        loss = self._accumulate(update, None, step, StepSums())
        found_P = self.machine.gradient()
        self.machine.begin()
        if not (math.isfinite(loss) and bool(torch.isfinite(found_P).all())):
            raise NonFiniteError(f"step {step}: the loss is {loss}, and the gradient has numbers that are not finite")
        return found_P

    def _proximal(self, updates: Sequence[Update]) -> dict[int, list[Tensor]]:
        """Log-probabilities before the first update, of what is not computed then anyway; by the number of the update."""
        if self.loss.proximal == "interpolate":  # the loss finds it between the other two
            return {}
        once = {update.number: update for update in updates[1:]}
        found = {}
        with torch.no_grad():
            for number, update in once.items():
                found[number] = [self.machine.predict(batch)[0] for batch in self._placed(update.batches)]
        return found

    def _update(self, update: Update, proximal: Sequence[Tensor] | None, step: int, sums: StepSums) -> bool:
        """One optimizer update; False, and nothing changed, when loss or gradient is not finite."""
        loss = self._accumulate(update, proximal, step, sums)
        norm, applied = self.machine.apply(step, finite=self.applies and math.isfinite(loss))
        sums.ended(loss, norm)
        return applied or not self.applies

    def _accumulate(self, update: Update, proximal: Sequence[Tensor] | None, step: int, sums: StepSums) -> float:
        """The gradient of an update, left in the machine; its loss comes back, over all ranks."""
        self.machine.begin()
        loss = 0.0
        for index, batch in enumerate(self._placed(update.batches)):
            logp_N, entropy_N, value_N = self.machine.predict(batch)
            if batch.num_tokens:
                inputs = self._inputs(batch, logp_N, entropy_N, None if proximal is None else proximal[index], step)
                outputs = objective(inputs, self.loss)
                total = self._critic(batch, value_N, update, step, sums)
                if step >= self.learner.critic.warmup_steps:  # before, only the critic learns
                    total = total + outputs.total / denominator(self.loss, update.counts)
                sums.add(batch, inputs, outputs)
            else:  # takes part in what ranks do together, and adds nothing
                self._reference(batch)
                total = logp_N.sum() + entropy_N.sum() + (0.0 if value_N is None else value_N.sum())
            loss += float(total.detach())
            self.machine.backward(total, last=index == len(update.batches) - 1)
        return self.ranks.total(loss)

    def _placed(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """One after the other, with all its tensors, on the machine's device."""
        return (batch.to(self.machine.device) for batch in batches)

    def _inputs(self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, known_N: Tensor | None, step: int) -> LossInputs:
        known_N = batch.logp_proximal_N if batch.logp_proximal_N is not None else known_N
        return LossInputs(
            logp_current_N=logp_N,
            logp_proximal_N=logp_N.detach() if known_N is None else known_N,
            logp_behaviour_N=batch.logp_behaviour_N,
            advantage_N=batch.advantage_N,
            sequence_N=batch.sequence_N,
            group_S=batch.group_S,
            staleness_N=step - batch.version_N,
            mask_N=batch.mask_N,
            logp_reference_N=self._reference(batch),
            entropy_N=entropy_N,
        )

    def _reference(self, batch: MicroBatch) -> Tensor | None:
        if batch.logp_reference_N is not None:
            return batch.logp_reference_N
        with torch.no_grad():
            return self.machine.reference(batch)

    def _critic(self, batch: MicroBatch, value_N: Tensor | None, update: Update, step: int, sums: StepSums) -> Tensor:
        """The critic's part of the loss, per token of the update; 0 without one."""
        if value_N is None or batch.value_N is None or batch.return_N is None:
            return torch.zeros((), device=batch.ids_RL.device)
        loss = value_loss(value_N, batch.value_N, batch.return_N, self.value_clip).sum()
        sums.add_critic(loss, value_N, batch.return_N)
        return self.learner.critic.coefficient * loss / update.counts.num_tokens
