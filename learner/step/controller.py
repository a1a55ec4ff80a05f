"""One learner step on all ranks: rank 0 controls the worker ranks, every call of the learner's loop is a command that all of
them carry out.

waits for   controller: what its ranks do together, at most `learner.rank_timeout_s`; worker rank: the next command
on close    the worker ranks end

A step is made the same way on plain torch and on DeepSpeed, which differ behind `Machine`. The proximal policy is the one
before the first update; where it must be known beforehand (a later update, a second pass), it is computed before any weight
moves.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rlhf.buffers.errors import NonFiniteError
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.batch.packing import Packing, Update, partition
from async_rlhf.learner.batch.rows import BatchRow, check_row
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.policy import Predicted
from async_rlhf.learner.objective.estimation import PolicyEvaluation
from async_rlhf.learner.objective.objective import Counts, LossInputs, denominator, objective, value_loss
from async_rlhf.learner.registry import loss_spec
from async_rlhf.learner.step.ranks import Ranks
from async_rlhf.learner.step.report import StepReport, StepSums
from async_rlhf.learner.step.torch_machine import Machine

# Weight of the critic's loss beside the policy's, as in PPO's own implementation.
_CRITIC = 0.5


class Controller:
    """Owns model, optimizer and schedule. The learner's loop calls rank 0's public methods; a worker rank is in `work`."""

    def __init__(self, machine: Machine, loss: LossConfig, longest: int | None = None) -> None:
        """longest: the most tokens that a completion can have, which `loss.reduction = "fixed"` needs."""
        self.machine, self._loss, self._longest = machine, loss, longest
        config, ranks = self._learner, self._ranks = machine.config, machine.ranks
        # ranks that share rows each compute the whole loss, so nothing is summed
        self._adding = ranks if config.ranks_per_row == 1 else Ranks()
        spec = loss_spec(loss.kind)
        self._ratios = spec.takes_ratios and not loss.allow_uncorrected
        self._others = int(loss.parameters["top_k"]) if "top_k" in spec.needs else 0
        self._of_updates: Mapping[str, Callable[..., Any]] = {
            "evaluate": self._evaluate, "train": self._train, "dry_run": self._dry_run, "gradient": self._gradient,
        }  # fmt: skip
        self._of_machine: Mapping[str, Callable[..., Any]] = {
            "tensors": machine.tensors, "canary": machine.canary, "snapshot": machine.snapshot, "load": machine.load,
        }  # fmt: skip
        images = machine.policy.images
        self._packing = Packing(
            config.micro_batch_tokens,
            machine.policy.sharing,
            config.row_tokens,
            machine.policy.token_cost,
            whole_groups=spec.level == "pair",
            sampling_masks=spec.takes_ratios,
            recorded_references=loss.needs_reference and not machine.with_reference,
            patches=images.num_patches if images and config.train_vision else None,
        )

    # -- rank 0: commands of the learner's loop ----------------------------------------------------------------------

    def evaluate(self, rows: Sequence[BatchRow], *, energies: bool = False) -> Mapping[int, PolicyEvaluation]:
        """Evaluations of the completions in `rows` under the current weights, by index in the batch."""
        found: Mapping[int, PolicyEvaluation] = self._together("evaluate", [rows], energies=energies)
        return found

    def step(self, updates: Sequence[Sequence[BatchRow]], step: int, rate: float | None = None) -> StepReport:
        """One learner step: an optimizer update from each list of rows, in order. `step` counts from 0. rate: in place of
        `learner.learning_rate`."""
        report: StepReport = self._together("train", updates, step=step, rate=rate)
        return report

    def dry_run(self, updates: Sequence[Sequence[BatchRow]], step: int) -> None:
        """`step` without its updates: forward, loss, backward, norm, report. Raises the errors of `step`.
        Nothing that a later step or checkpoint depends on is changed, and the gradient is dropped. As in a step,
        ranks that were given work when one of them raises do not go on."""
        self._together("dry_run", updates, step=step)

    def gradient(self, rows: Sequence[BatchRow], step: int) -> Tensor:
        """float32 [P]: the gradient of an update over all ranks, before clipping; see `Machine.gradient`. The present policy is
        the one at the start of the step; nothing is changed. Raises NonFiniteError."""
        found_P: Tensor = self._together("gradient", [rows], step=step)
        return found_P

    def tensors(self) -> Mapping[str, RawTensor]:
        """All parameters by name, each once, ready to publish, without a tower that does not learn; or the adapters of some
        (`learner.lora.publish`).

        In host memory, on a CPU perhaps the parameters' own: they hold until the next step (`is_read`) and the next call.
        """
        tensors: Mapping[str, RawTensor] = self._together("tensors")
        return tensors

    def is_read(self, until: threading.Event) -> None:
        """The result of `tensors` is being read: no step changes it before `until` is set."""
        self.machine.is_read(until)

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        """A text and its log-probabilities under the weights that `tensors` gives. ids: how it begins; none: any tokens.

        Raises NonFiniteError when those are no numbers.
        """
        canary: Canary = self._together("canary", ids=list(ids))
        return canary

    def snapshot(self) -> Callable[[Path], None]:
        """Begin to save the present state. The writer that comes back may run in another thread while steps go on; it fills
        an existing directory with `model/` (a Hugging Face directory), the optimizer's state and the critic."""
        writer: Callable[[Path], None] = self._together("snapshot")
        return writer

    def load(self, directory: Path) -> None:
        """Restore a state saved by any backend on any number of ranks; on CPU a single torch rank goes on bit for bit."""
        self._together("load", directory=str(directory))

    def close(self) -> None:
        """End the worker ranks."""
        self._ranks.command({"do": "close"})

    def partition(self, updates: Sequence[Sequence[BatchRow]]) -> list[list[Update]]:
        """Each rank's micro-batches of every update.

        Raises RecordError for a token that the model does not have; when the loss takes ratios to a truncated distribution
        that was not recorded; and when a rollout is without its log-probabilities under a reference that is not loaded here.
        """
        vocabulary, references = self.machine.policy.vocabulary, self._packing.recorded_references
        for row in (row for rows in updates for row in rows):
            check_row(row, vocabulary, self.machine.policy.routing, sampling_masks=self._ratios, references=references)
        together = self._learner.ranks_per_row
        parts = partition(updates, self._ranks.size // together, self._packing)
        return [part for part in parts for _ in range(together)]

    def _together(self, name: str, updates: Sequence[Sequence[BatchRow]] | None = None, **given: Any) -> Any:
        """A command on every rank that takes part in it: with its micro-batches of the updates, or of the machine."""
        if updates is None:
            if self.machine.collective or name == "load":
                self._ranks.command({"do": name, "given": given})
            return self._do(name, None, given)
        parts = self.partition(updates)
        if self._ranks.size > 1:
            named = [{"counts": list(vars(u.counts).values()), "number": u.number, "batches": len(u.batches)} for u in parts[0]]
            tensors = [[batch.tensors() for update in part for batch in update.batches] for part in parts]
            self._ranks.command({"do": name, "updates": named, "given": given}, tensors)
        return self._do(name, parts[0], given)

    def work(self) -> None:
        """Worker ranks: carry out rank 0's commands until `close`. Raises RankLostError when none comes in time."""
        while True:
            header, tensors = self._ranks.commanded()
            if header["do"] == "close":
                return
            waiting = map(MicroBatch.of, tensors)
            named = [
                (tuple(islice(waiting, u["batches"])), Counts(*u["counts"]), u["number"]) for u in header.get("updates", ())
            ]
            self._do(header["do"], [Update(*each) for each in named] if "updates" in header else None, header["given"])

    def _do(self, name: str, updates: Sequence[Update] | None, given: Mapping[str, Any]) -> Any:
        """This rank's part of a command."""
        return self._of_machine[name](**given) if updates is None else self._of_updates[name](updates, **given)

    # -- every rank: its part ----------------------------------------------------------------------------------------

    def _evaluate(self, updates: Sequence[Update], energies: bool) -> dict[int, PolicyEvaluation]:
        """On rank 0 the evaluations of all ranks' completions, on the others none."""
        evaluated: dict[str, Tensor] = {}
        with torch.no_grad():
            for batch in self._placed(updates[0].batches):
                seen = self.machine.predict(batch, energies)
                named = {"logp_proximal": seen.logp_N, "value": seen.value_N, "energy": seen.energy_N}
                named["logp_reference"], _ = self._reference(batch)
                owner_N = batch.member_N.cpu()
                for name, value_N in ((name, each.float().cpu()) for name, each in named.items() if each is not None):
                    evaluated |= {f"{member} {name}": value_N[owner_N == member] for member in set(owner_N.tolist())}
        values: dict[int, dict[str, np.ndarray]] = {}
        for key, tensor in ((key, tensor) for each in self._ranks.gather(evaluated) or () for key, tensor in each.items()):
            member, name = key.split()
            values.setdefault(int(member), {})[name] = tensor.numpy()
        return {member: PolicyEvaluation(**arrays) for member, arrays in values.items()}

    def _train(self, updates: Sequence[Update], step: int, rate: float | None, applies: bool = True) -> StepReport:
        """A learner step; rank 0's report is of all ranks, the others' of nothing. applies: False refuses the updates as those
        are whose gradient is not finite, and goes on to the next."""
        sums = StepSums(interpolates=self._loss.proximal == "interpolate")
        proximal = self._proximal(updates)
        applied = True
        for update in updates:
            loss = self._accumulate(update, proximal.get(update.number), step, sums)
            norm, applied = self.machine.apply(step, finite=applies and math.isfinite(loss), rate=rate)
            sums.ended(loss, norm)
            for _ in range(1, self._learner.critic.updates if applied else 1):
                applied = applied and self._fit_critic(update, step)
            if applies and not applied:
                break
        return sums.report(self._adding, applied, self._loss.is_cap)

    def _fit_critic(self, update: Update, step: int) -> bool:
        """One more update from these tokens, of the critic alone; whether it was made."""
        self.machine.begin()
        loss = 0.0
        for index, batch in enumerate(self._placed(update.batches)):
            value_N = self.machine.values(batch)
            total = self._critic(batch, value_N, update, StepSums()) + 0.0 * value_N.sum()  # a rank may have no token
            loss += float(total.detach())
            self.machine.backward(total, last=index == len(update.batches) - 1)
        self.machine.keep_critic()
        return self.machine.apply(step, finite=math.isfinite(self._adding.total(loss)))[1]

    def _dry_run(self, updates: Sequence[Update], step: int) -> None:
        self._train(updates, step, None, applies=False)
        self.machine.begin()

    def _gradient(self, updates: Sequence[Update], step: int) -> Tensor:
        loss = self._accumulate(updates[0], None, step, StepSums())
        found_P = self.machine.gradient()
        self.machine.begin()
        if not (math.isfinite(loss) and bool(torch.isfinite(found_P).all())):
            raise NonFiniteError(f"step {step}: the loss is {loss}, and the gradient has numbers that are not finite")
        return found_P

    def _proximal(self, updates: Sequence[Update]) -> dict[int, list[Tensor]]:
        """Log-probabilities before the first update, where no step computes them anyway; by the number of the update."""
        if self._loss.proximal == "interpolate":  # the loss finds it between the other two
            return {}
        once = {update.number: update.batches for update in updates[1:]}
        with torch.no_grad():
            return {n: [self.machine.predict(batch).logp_N for batch in self._placed(batches)] for n, batches in once.items()}

    def _accumulate(self, update: Update, proximal: Sequence[Tensor] | None, step: int, sums: StepSums) -> float:
        """The gradient of an update, left in the machine; its loss comes back, over all ranks."""
        self.machine.begin()
        loss, learns = 0.0, not self._learner.critic.learns_alone(step)
        for index, batch in enumerate(self._placed(update.batches)):
            seen = self.machine.predict(batch, others=self._others)
            if batch.num_tokens:
                inputs = self._inputs(batch, seen, None if proximal is None else proximal[index], step)
                outputs = objective(inputs, self._loss)
                total = self._critic(batch, seen.value_N, update, sums)
                if learns:
                    total = total + outputs.total / denominator(self._loss, update.counts, self._longest)
                sums.add(batch, inputs, outputs)
            else:  # takes part in the collectives, and adds nothing
                self._reference(batch, seen.others_NK)
                of_policy = (seen.logp_N, seen.entropy_N) if learns else ()
                total = torch.cat([each for each in (*of_policy, seen.value_N) if each is not None]).sum()
            loss += float(total.detach())
            self.machine.backward(total, last=index == len(update.batches) - 1)
        return self._adding.total(loss)

    def _placed(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """One after the other, with all its tensors, on the machine's device."""
        return (batch.to(self.machine.device) for batch in batches)

    def _inputs(self, batch: MicroBatch, seen: Predicted, known_N: Tensor | None, step: int) -> LossInputs:
        known_N = batch.logp_proximal_N if batch.logp_proximal_N is not None else known_N
        reference_N, reference_NK = self._reference(batch, seen.others_NK)
        return LossInputs(
            logp_current_N=seen.logp_N,
            logp_proximal_N=seen.logp_N.detach() if known_N is None else known_N,
            logp_behaviour_N=batch.logp_behaviour_N,
            advantage_N=batch.advantage_N,
            sequence_N=batch.sequence_N,
            group_S=batch.group_S,
            staleness_N=step - batch.version_N,
            mask_N=batch.mask_N,
            logp_reference_N=reference_N,
            logp_current_NK=seen.logp_others_NK,
            logp_reference_NK=reference_NK,
            entropy_N=seen.entropy_N,
        )

    def _reference(self, batch: MicroBatch, others: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The reference's log-probabilities [N], and [N, K] of other tokens; None without a reference."""
        if batch.logp_reference_N is not None:
            return batch.logp_reference_N, None
        with torch.no_grad():
            predicted = self.machine.reference(batch, 0 if others is None else others)
        return (None, None) if predicted is None else (predicted.logp_N, predicted.logp_others_NK)

    def _critic(self, batch: MicroBatch, value_N: Tensor | None, update: Update, sums: StepSums) -> Tensor:
        """The critic's part of the loss, per token of the update; 0 without one."""
        if value_N is None or batch.value_N is None or batch.return_N is None:
            return torch.zeros((), device=batch.ids_RL.device)
        loss = value_loss(value_N, batch.value_N, batch.return_N).sum()
        sums.add_critic(loss, value_N, batch.return_N)
        return _CRITIC * loss / update.counts.num_tokens


def make_backend(
    model_dir: Path,
    config: LearnerConfig,
    loss: LossConfig,
    publish_dtype: str = "float32",
    ranks: Ranks | None = None,
    reference: Path | None = None,
    max_steps: int | None = None,
    longest: int | None = None,
    images: Path | None = None,
) -> Controller:
    """This rank's part of the learner. publish_dtype, reference, max_steps, images: as of `Machine`, which raises ConfigError;
    longest: as of `Controller`."""
    # Else DeepSpeed chooses the best accelerator at import; transformers imports it too, to save a model.
    os.environ["DS_ACCELERATOR"] = config.device.partition(":")[0]
    kind = Machine
    if config.backend == "deepspeed":
        from async_rlhf.learner.step.deepspeed_machine import DeepSpeedMachine as kind
    return Controller(kind(model_dir, config, ranks or Ranks(), publish_dtype, reference, max_steps, images), loss, longest)
