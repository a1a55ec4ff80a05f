"""One number to differentiate: correction, loss, reduction, KL and entropy terms, as configured; and the critic's own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.corrections import correct, interpolated, kl_loss
from async_rlhf.learner.objective.loss import LossInputs, LossOutputs
from async_rlhf.learner.registry import load_loss, loss_spec

# PPO's: how far from the value at the start of a step a new one counts.
VALUE_CLIP = 0.2


def objective(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The sum to differentiate for the tokens of one call; divide by `denominator(config, counts)`.

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
        correction = correct(
            inputs, config, weigh=kind.corrects == "weights and masks", whole_sequences=kind.level == "sequence"
        )
        weight_N, sums = correction.weight_N, {**sums, **correction.sums}
    terms, own_sums = load_loss(config.kind)(inputs, weight_N, config)
    per_token_N = _per_token(inputs, config, sums)
    if kind.level == "token":
        total = _reduced(terms + per_token_N, inputs.sequence_N, kind.level, config)
    else:
        total = terms.sum() + _reduced(per_token_N, inputs.sequence_N, kind.level, config)
    return LossOutputs(total=total, sums={**sums, **own_sums})


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
