"""What one learner step reports: means over the tokens of all its micro-batches, on all ranks."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from async_rlhf.learner.backend import StepReport
from async_rlhf.learner.batch import MicroBatch
from async_rlhf.learner.corrections import ratio
from async_rlhf.learner.diagnostics import StepTokens, measure
from async_rlhf.learner.losses import LossInputs, LossOutputs
from async_rlhf.learner.ranks import Ranks


class StepSums:
    """Filled micro-batch by micro-batch; `report` puts the ranks together."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._sums: dict[str, Tensor] = {}
        self._tokens: list[StepTokens] = []
        self._members: list[Tensor] = []

    def add(self, batch: MicroBatch, inputs: LossInputs, outputs: LossOutputs) -> None:
        entropy = {} if inputs.entropy_N is None else {"entropy": inputs.entropy_N.detach().sum()}
        for name, value in {**entropy, **outputs.sums}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        self._tokens.append(StepTokens(inputs.logp_proximal_N, inputs.logp_behaviour_N, inputs.advantage_N, inputs.staleness_N))
        self._members.append(batch.member_N)

    def add_critic(self, loss: Tensor, value_N: Tensor, return_N: Tensor) -> None:
        """`loss` is a sum over tokens."""
        for name, each in {
            "critic/loss": loss,
            "critic/value_mean": value_N.sum(),
            "critic/return_mean": return_N.sum(),
        }.items():
            self._sums[name] = self._sums.get(name, 0.0) + each.detach().double()

    def ended(self, loss: float, grad_norm: float) -> None:
        """An update has ended, made or not."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)

    def report(self, ranks: Ranks, applied: bool, cap: float | None) -> StepReport:
        """Means over tokens, and the diagnostics of `StepTokens`. Of nothing on ranks above 0."""
        mine = {name: value.cpu() for name, value in self._sums.items()}
        if self._tokens:
            mine |= {field: tensor.cpu() for field, tensor in vars(StepTokens.joined(self._tokens)).items()}
            mine["member_N"] = torch.cat(self._members).cpu()
        everyone = ranks.gather(mine)
        if everyone is None:
            return StepReport.of_nothing()
        busy = [each for each in everyone if "member_N" in each]
        tokens = StepTokens.joined(
            [StepTokens(**{field.name: each[field.name] for field in fields(StepTokens)}) for each in busy]
        )
        member_N = torch.cat([each["member_N"] for each in busy])
        names = [name for each in busy for name in each if not name.endswith("_N")]
        metrics = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            **measure(tokens, cap),
            **{name: sum(float(each.get(name, 0.0)) for each in busy) / len(member_N) for name in names},
        }
        return StepReport(metrics, _means(ratio(tokens.logp_proximal_N, tokens.logp_behaviour_N), member_N), applied)


def _means(value_N: Tensor, member_N: Tensor) -> dict[int, float]:
    """Mean value by member."""
    members, place_N = torch.unique(member_N, return_inverse=True)
    totals = torch.zeros(len(members)).index_add_(0, place_N, value_N)
    return dict(zip(members.tolist(), (totals / torch.bincount(place_N)).tolist(), strict=True))
