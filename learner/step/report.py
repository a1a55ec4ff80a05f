"""The report of one learner step: means over the tokens of all ranks, and the distance of its data from the policy.

An effective sample size near 1 does not certify a step: runs have died at 0.99. So tails, moments and signs are measured too,
and what the engine's arithmetic does (tokens of the same weights alone) apart from what staleness does (all others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.objective.corrections import effective_sample_size, log_ratio, ratio
from async_rlhf.learner.objective.objective import LossInputs, LossOutputs
from async_rlhf.learner.step.ranks import Ranks

_QUANTILES = {"is/ratio_q01": 0.01, "is/ratio_q50": 0.5, "is/ratio_q99": 0.99}
# Where weights are commonly truncated; the tail is measured beyond it whatever the loss does there.
_DEFAULT_CAP = 2.0


class StepTokens(NamedTuple):
    """All tokens of a step: float32 [N] logp_proximal_N, logp_behaviour_N, advantage_N; int64 [N] staleness_N; bool [N]
    comparable_N and int64 [N] member_N, as in `MicroBatch`."""

    logp_proximal_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    staleness_N: Tensor
    comparable_N: Tensor
    member_N: Tensor

    @classmethod
    def joined(cls, parts: Sequence[StepTokens]) -> StepTokens:
        """The tokens of micro-batches or ranks, concatenated."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def measure(tokens: StepTokens, cap: float | None) -> dict[str, Any]:
    """Numbers by name, always the same names; None where there is no token to measure.

    is/*: of the ratio proximal / behaviour before truncation. second_moment: mean squared log-ratio. tail_negative: share of
    all ratio mass that lies above the cap on tokens with a negative advantage, the unbounded side of a policy loss.
    kl/behaviour: mean of log p_behaviour - log p_proximal over behaviour's tokens, an unbiased estimate of the divergence.
    mismatch/*: over comparable tokens of staleness 0, where both policies are meant to be one: the engine's noise. drift/kl:
    over tokens of any other staleness, less the noise. drift/by_staleness: k3 estimate of the divergence and number of tokens
    at each staleness.
    """
    log_N = log_ratio(tokens.logp_proximal_N, tokens.logp_behaviour_N).double()
    ratio_N = log_N.exp()
    above_N = (ratio_N > (_DEFAULT_CAP if cap is None else cap)) & (tokens.advantage_N < 0)
    quantiles = torch.quantile(_thinned(ratio_N), torch.tensor(list(_QUANTILES.values()), dtype=ratio_N.dtype))
    k3_N = ratio_N - 1 - log_N  # of behaviour from proximal, at tokens of behaviour
    fresh_N = tokens.staleness_N == 0
    same_N = fresh_N & tokens.comparable_N
    mismatch, stale = _mean(k3_N, same_N), _mean(k3_N, ~fresh_N)
    return {
        "is/ratio_max": float(ratio_N.max()),
        "is/ratio_mean": float(ratio_N.mean()),
        **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
        "is/ess": float(effective_sample_size(ratio_N)),
        "is/second_moment": float(log_N.square().mean()),
        "is/tail_negative": float(ratio_N[above_N].sum() / ratio_N.sum()),
        "kl/behaviour": float((tokens.logp_behaviour_N - tokens.logp_proximal_N).double().mean()),
        "mismatch/kl": mismatch,
        "mismatch/abs_log_ratio": _mean(log_N.abs(), same_N),
        "mismatch/tokens": int(same_N.sum()),
        "drift/kl": None if stale is None else stale - (mismatch or 0.0),
        "drift/by_staleness": _curve(k3_N, tokens.staleness_N),
    }


def _curve(k3_N: Tensor, staleness_N: Tensor) -> Mapping[str, Mapping[str, float]]:
    ages_A, place_N, counts_A = torch.unique(staleness_N, return_inverse=True, return_counts=True)
    sums_A = torch.zeros(len(ages_A), dtype=k3_N.dtype).index_add(0, place_N, k3_N)
    of_ages = zip(ages_A.tolist(), (sums_A / counts_A).tolist(), counts_A.tolist(), strict=True)
    return {str(age): {"kl": kl, "tokens": count} for age, kl, count in of_ages}


def _mean(values_N: Tensor, where_N: Tensor) -> float | None:
    return float(values_N[where_N].mean()) if bool(where_N.any()) else None


def _thinned(values_N: Tensor, most: int = 1 << 20) -> Tensor:
    """At most `most` values, evenly spread: quantiles of more cost more than they tell (and are refused above 2^24)."""
    return values_N[:: -(-len(values_N) // most)]


@cache
def step_metrics() -> tuple[str, ...]:
    """The names that every step reports; a loss and a critic add their own."""
    own = ("loss", "entropy", "grad_norm", "clip_ratio/region_mean", "is/weight_mean", "is/masked_ratio", "is/clamped_ratio")
    one = torch.zeros(1)
    return *own, *measure(StepTokens(one, one, one, one, one.bool(), one), cap=None)


@dataclass(frozen=True)
class StepReport:
    """The metrics of one learner step by name, and the mean ratio proximal / behaviour of each completion."""

    metrics: Mapping[str, Any]
    weight_of_member: Mapping[int, float]
    applied: bool
    """False when an update was refused because its loss or gradient is not finite. Weights and optimizer are then as
    that update found them, and the updates after it were not tried."""

    @classmethod
    def of_nothing(cls) -> StepReport:
        """The report of a step without a token to learn from: every metric is None, so that its names always exist."""
        return cls(dict.fromkeys(step_metrics()), {}, applied=False)


class StepSums:
    """Filled micro-batch by micro-batch; `report` puts the ranks together. interpolates: the policy at the start of the step is
    known in its first update alone."""

    def __init__(self, *, interpolates: bool = False) -> None:
        self._interpolates = interpolates
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._sums: dict[str, Tensor] = {}
        self._tokens: list[StepTokens] = []

    def add(self, batch: MicroBatch, inputs: LossInputs, outputs: LossOutputs) -> None:
        self._add(outputs.sums if inputs.entropy_N is None else {"entropy": inputs.entropy_N.sum(), **outputs.sums})
        comparable_N = batch.comparable_N & (not (self._interpolates and self._losses))
        proximal_N, behaviour_N = inputs.logp_proximal_N, inputs.logp_behaviour_N
        rest = inputs.advantage_N, inputs.staleness_N, comparable_N, batch.member_N
        self._tokens.append(StepTokens(proximal_N, behaviour_N, *rest))

    def add_critic(self, loss: Tensor, value_N: Tensor, return_N: Tensor) -> None:
        """`loss` is a sum over tokens."""
        self._add({"critic/loss": loss, "critic/value_mean": value_N.sum(), "critic/return_mean": return_N.sum()})

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()

    def ended(self, loss: float, grad_norm: float) -> None:
        """An update has ended, made or not."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)

    def report(self, ranks: Ranks, applied: bool, cap: float | None) -> StepReport:
        """Means over tokens, and the diagnostics of `StepTokens`. Of nothing on ranks above 0."""
        mine = {name: value.cpu() for name, value in self._sums.items()}
        if self._tokens:
            mine |= {name: tensor.cpu() for name, tensor in StepTokens.joined(self._tokens)._asdict().items()}
        everyone = ranks.gather(mine)
        if everyone is None:
            return StepReport.of_nothing()
        busy = [each for each in everyone if "member_N" in each]
        tokens = StepTokens.joined([StepTokens(*(each.pop(name) for name in StepTokens._fields)) for each in busy])
        names = dict.fromkeys(name for each in busy for name in each)
        metrics = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            **measure(tokens, cap),
            **{name: sum(float(each.get(name, 0.0)) for each in busy) / len(tokens.member_N) for name in names},
        }
        ratio_N = ratio(tokens.logp_proximal_N, tokens.logp_behaviour_N)
        members, place_N = torch.unique(tokens.member_N, return_inverse=True)
        means = torch.zeros(len(members)).index_add_(0, place_N, ratio_N) / torch.bincount(place_N)
        return StepReport(metrics, dict(zip(members.tolist(), means.tolist(), strict=True)), applied)
