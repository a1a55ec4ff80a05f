"""What the log-probabilities of a step say about how far its data are from the policy. Pure; over all tokens of the step.

An effective sample size near 1 does not certify a step: runs have died at 0.99. So tails, moments and signs are measured too,
and what the engine's arithmetic does (tokens of staleness 0) apart from what staleness does (all others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from async_rlhf.learner.corrections.ratios import effective_sample_size, log_ratio

_QUANTILES = {"is/ratio_q01": 0.01, "is/ratio_q50": 0.5, "is/ratio_q99": 0.99}
# Where weights are commonly truncated; the tail is measured beyond it whatever the loss does there.
_DEFAULT_CAP = 2.0
NAMES = (
    "is/ratio_max",
    "is/ratio_mean",
    *_QUANTILES,
    "is/ess",
    "is/second_moment",
    "is/tail_negative",
    "kl/behaviour",
    "mismatch/kl",
    "mismatch/abs_log_ratio",
    "drift/kl",
    "drift/by_staleness",
)


@dataclass(frozen=True)
class StepTokens:
    """Of all tokens of a step: float32 [N] logp_proximal_N, logp_behaviour_N, advantage_N; int64 [N] staleness_N."""

    logp_proximal_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    staleness_N: Tensor

    @classmethod
    def joined(cls, parts: list[StepTokens]) -> StepTokens:
        """Of micro-batches or ranks, one after the other."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def measure(tokens: StepTokens, cap: float | None) -> dict[str, Any]:
    """One number for each of `NAMES`; None where no token could say anything.

    is/*: of the ratio proximal / behaviour before truncation. second_moment: mean squared log-ratio. tail_negative: share of
    all ratio mass that lies above the cap on tokens with a negative advantage, the unbounded side of a policy loss.
    kl/behaviour: mean of log p_behaviour - log p_proximal over behaviour's tokens, an unbiased estimate of the divergence.
    mismatch/*: over tokens of staleness 0, where both policies are meant to be one: the engine's noise. drift/kl: over the
    others, less the noise. drift/by_staleness: k3 estimate of the divergence and number of tokens at each staleness.
    """
    log_N = log_ratio(tokens.logp_proximal_N, tokens.logp_behaviour_N).double()
    ratio_N = log_N.exp()
    above_N = (ratio_N > (_DEFAULT_CAP if cap is None else cap)) & (tokens.advantage_N < 0)
    quantiles = torch.quantile(_thinned(ratio_N), torch.tensor(list(_QUANTILES.values()), dtype=ratio_N.dtype))
    k3_N = ratio_N - 1 - log_N  # of behaviour from proximal, at tokens of behaviour
    fresh_N = tokens.staleness_N == 0
    mismatch, stale = _mean(k3_N, fresh_N), _mean(k3_N, ~fresh_N)
    return {
        "is/ratio_max": float(ratio_N.max()),
        "is/ratio_mean": float(ratio_N.mean()),
        **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
        "is/ess": float(effective_sample_size(ratio_N)),
        "is/second_moment": float(log_N.square().mean()),
        "is/tail_negative": float(ratio_N[above_N].sum() / ratio_N.sum()),
        "kl/behaviour": float((tokens.logp_behaviour_N - tokens.logp_proximal_N).double().mean()),
        "mismatch/kl": mismatch,
        "mismatch/abs_log_ratio": _mean(log_N.abs(), fresh_N),
        "drift/kl": None if stale is None else stale - (mismatch or 0.0),
        "drift/by_staleness": _curve(k3_N, tokens.staleness_N),
    }


def of_nothing() -> dict[str, Any]:
    """The same names, of a step without a token."""
    return dict.fromkeys(NAMES)


def _curve(k3_N: Tensor, staleness_N: Tensor) -> Mapping[str, Mapping[str, float]]:
    ages_A, place_N, counts_A = torch.unique(staleness_N, return_inverse=True, return_counts=True)
    sums_A = torch.zeros(len(ages_A), dtype=k3_N.dtype).index_add(0, place_N, k3_N)
    of_ages = zip(ages_A.tolist(), (sums_A / counts_A).tolist(), counts_A.tolist(), strict=True)
    return {str(age): {"kl": kl, "tokens": count} for age, kl, count in of_ages}


def _mean(values_N: Tensor, where_N: Tensor) -> float | None:
    return float(values_N[where_N].mean()) if bool(where_N.any()) else None


def _thinned(values_N: Tensor, most: int = 1 << 20) -> Tensor:
    """At most `most` of them, evenly spread: quantiles of more cost more than they tell (and are refused above 2^24)."""
    return values_N[:: -(-len(values_N) // most)]
