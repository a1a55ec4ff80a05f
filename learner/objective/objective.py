"""The seam between the mathematics and the machine: what a loss is given and what it gives back; and the one number to
differentiate: correction, loss, reduction, KL and entropy terms, as configured, and the critic's own.

Axes: N loss-bearing tokens of one call (a micro-batch, packed, no padding), S completions ("sequences") among them.

*Cutting.* A sequence is never cut between two calls. When the `level` of its declaration is "pair", neither is a group.

*Adding.* A loss returns a **sum**. The machine divides every sum of an update by one number, `denominator`,
where `counts` are those of the whole update over all micro-batches and ranks; masked tokens count too, so that a mask never
changes the learning rate of what is left. So micro-batches, minibatches and ranks add exactly, and nothing about the batch
needs to be known inside a call. Metrics in `sums` are sums over tokens: divide by `counts.num_tokens`.

*Looking at the whole batch.* What cannot be computed within one call (a critic's advantages, KL in the reward, the second
moment mask) is computed before the first update: the trainer takes from `Controller.evaluate(rows)` a `PolicyEvaluation` of
every completion, and hands back `TokenTargets`, which come with the rows (`Member.targets`) into these inputs. `evaluate` is
called only when `needs_evaluation` is true; otherwise the backend finds log p_proximal itself as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.corrections import (
    MAX_LOG_RATIO,
    divergence_mask,
    interpolated,
    kl_loss,
    off_policy_mask,
    sequence_mask,
    sequence_weight,
    token_mask,
    truncated_weight,
)
from async_rlhf.learner.registry import load_function, loss_spec

# PPO's: how far from the value at the start of a step a new one counts.
VALUE_CLIP = 0.2


@dataclass(frozen=True)
class LossInputs:
    """float32 [N] unless noted otherwise; only what is of the current policy carries a gradient.

    logp_current_N, logp_proximal_N, logp_behaviour_N: log-probabilities of the chosen tokens at the sampling temperature,
    now, at the start of the step, and when sampled. logp_reference_N: under the frozen reference (`needs_reference`).
    logp_current_NK, logp_reference_NK: of the K tokens that are likeliest in a token's place under the current policy, for a
    loss that declares `top_k`.
    advantage_N. mask_N: what a token's weight is multiplied by, 0 where it is masked, from corrections that look at the whole
    batch; None is all ones.
    sequence_N: int64, ascending from 0 to S - 1. group_S: int64, equal for siblings. staleness_N: int64, in steps.
    entropy_N: of the current policy at each token, needed with its gradient only when `entropy_coef` is not 0.
    """

    logp_current_N: Tensor
    logp_proximal_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    sequence_N: Tensor
    group_S: Tensor
    staleness_N: Tensor
    mask_N: Tensor | None = None
    logp_reference_N: Tensor | None = None
    logp_current_NK: Tensor | None = None
    logp_reference_NK: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """`total`: the scalar to differentiate, a sum; `sums`: sums over tokens, to be divided by their number for a mean."""

    total: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class Counts:
    """Tokens and completions of one optimizer update, over all its micro-batches and ranks, masked or not."""

    num_tokens: int
    num_sequences: int
    num_groups: int


def denominator(config: LossConfig, counts: Counts, longest: int | None = None) -> float:
    """The divisor of an update's sum: a constant of the data, never of masks or weights.

    token: every token weighs the same. sequence: every completion does. fixed: every token does, and the divisor is the
    number of completions times `longest`, the most tokens that one can have, so that it does not move with the lengths (Dr.
    GRPO, arXiv 2503.20783).
    """
    level = loss_spec(config.kind).level
    if level == "pair":
        return counts.num_groups
    if level == "sequence" or config.reduction == "sequence":
        return counts.num_sequences
    if config.reduction == "fixed":
        if longest is None:
            raise ValueError("loss.reduction = 'fixed' needs the most tokens that a completion can have")
        return counts.num_sequences * float(longest)
    return counts.num_tokens


def objective(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The sum to differentiate for the tokens of one call; divide by `denominator`.

    sum over terms of the loss, times its correction, + kl_coef KL(current | reference) - entropy_coef entropy per token.
    """
    kind = loss_spec(config.kind)
    if config.proximal == "interpolate":
        between_N = interpolated(inputs.logp_current_N, inputs.logp_behaviour_N, inputs.staleness_N)
        inputs = replace(inputs, logp_proximal_N=between_N)
    weight_N = torch.ones_like(inputs.advantage_N)
    none, all_N = weight_N.new_zeros(()), weight_N.sum()
    sums = {"clip_ratio/region_mean": none, "is/masked_ratio": none, "is/clamped_ratio": none, "is/weight_mean": all_N}
    if kind.corrects != "nothing":
        weight_N, corrected = _correction(inputs, config)
        sums |= corrected
    terms, own_sums = load_function("loss", config.kind)(inputs, weight_N, **config.arguments)
    per_token_N = _per_token(inputs, config, sums)
    if kind.level == "token":
        total = _reduced(terms + per_token_N, inputs.sequence_N, kind.level, config)
    else:
        total = terms.sum() + _reduced(per_token_N, inputs.sequence_N, kind.level, config)
    return LossOutputs(total=total, sums={**sums, **own_sums})


def importance_weight(proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor, config: LossConfig) -> Tensor:
    """[N], no gradient: the truncated weight of proximal against behaviour, 1 where the loss takes none."""
    kind = loss_spec(config.kind)
    if kind.corrects != "weights and masks" or config.is_cap is None:
        return torch.ones_like(behaviour_N)
    if kind.level == "sequence" or config.is_level != "token":  # a term that is a completion has one weight
        geometric = config.is_level != "product"
        return sequence_weight(proximal_N, behaviour_N, sequence_N, config.is_cap, geometric=geometric)
    return truncated_weight(proximal_N, behaviour_N, config.is_cap)


def _correction(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N], no gradient: the correction of proximal against behaviour that the loss multiplies its terms by, masks multiplied
    in; and sums over tokens."""
    proximal_N, behaviour_N, sequence_N = inputs.logp_proximal_N.detach(), inputs.logp_behaviour_N, inputs.sequence_N
    weight_N = importance_weight(proximal_N, behaviour_N, sequence_N, config)
    scale_N = torch.ones_like(inputs.advantage_N) if inputs.mask_N is None else inputs.mask_N
    kept_N = scale_N > 0
    if config.token_mask is not None:
        kept_N = kept_N & token_mask(proximal_N, behaviour_N, *config.token_mask)
    if config.sequence_mask is not None:
        kept_N = kept_N & sequence_mask(proximal_N, behaviour_N, sequence_N, *config.sequence_mask)
    if config.off_policy_delta is not None:
        kept_N = kept_N & off_policy_mask(proximal_N, behaviour_N, inputs.advantage_N, sequence_N, config.off_policy_delta)
    if config.divergence_mean is not None or config.divergence_max is not None:
        limits = config.divergence_mean or math.inf, config.divergence_max or math.inf
        kept_N = kept_N & divergence_mask(proximal_N, behaviour_N, sequence_N, limits)
    beyond_N = (proximal_N - behaviour_N).abs() > MAX_LOG_RATIO
    sums = {
        "is/masked_ratio": (~kept_N).float().sum(),
        "is/clamped_ratio": beyond_N.float().sum(),
        "is/weight_mean": weight_N.sum(),
    }
    return weight_N * kept_N * scale_N, sums


def _per_token(inputs: LossInputs, config: LossConfig, sums: dict[str, Tensor]) -> Tensor:
    """[N]: the terms every loss may have besides its own."""
    total_N = torch.zeros_like(inputs.advantage_N)
    if config.kl_coef > 0 and config.kl_in == "loss":
        if inputs.logp_reference_N is None:
            raise ValueError("loss.kl_coef needs log-probabilities under the reference")
        total_N = total_N + config.kl_coef * kl_loss(
            inputs.logp_current_N, inputs.logp_behaviour_N, inputs.logp_reference_N, config.kl_estimator, config.is_cap
        )
    if config.entropy_coef > 0:
        if inputs.entropy_N is None:
            raise ValueError("loss.entropy_coef needs the entropy of each token's distribution")
        total_N = total_N - config.entropy_coef * inputs.entropy_N
    if inputs.logp_reference_N is not None:
        # of the policy that sampled these tokens: of any other their mean log-ratio is no estimate of its divergence
        sums["kl/reference"] = (inputs.logp_behaviour_N - inputs.logp_reference_N).sum()
    return total_N


def _reduced(loss_N: Tensor, sequence_N: Tensor, level: str, config: LossConfig) -> Tensor:
    """Scalar: per-token terms summed so that the division by `denominator` makes the configured reduction.

    Beside a loss of whole completions or pairs they are averaged over each completion.
    """
    if level == "token" and config.reduction != "sequence":
        return loss_N.sum()
    return (loss_N / torch.bincount(sequence_N)[sequence_N]).sum()


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor) -> Tensor:
    """[N]: max((V - R)^2, (V' - R)^2) / 2, with V' the value held within `VALUE_CLIP` of the one at the start of the step.

    PPO's clipped value loss (detail 9 of Huang et al. 2022, "The 37 implementation details of proximal policy optimization").
    `value_N` carries the gradient. Per token, to be summed and divided like a token loss.
    """
    held_N = old_value_N + (value_N - old_value_N).clamp(-VALUE_CLIP, VALUE_CLIP)
    return (value_N - return_N).square().maximum((held_N - return_N).square()) / 2
