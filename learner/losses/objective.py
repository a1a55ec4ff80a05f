"""From the table's line to one number: correction, loss, reduction, KL and entropy terms, as the configuration says."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.config import LossConfig
from learner.corrections import truncated_weight
from learner.losses.base import Counts, LossInputs, LossOutputs, denominator
from learner.losses.table import LOSSES


def objective(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The sum to differentiate for the tokens of one call; divide by `divisor(config, counts)`."""
    loss = LOSSES[config.kind]
    weight_N = torch.ones_like(inputs.advantage_N)
    if config.kind == "decoupled_ppo" and config.is_cap is not None:
        weight_N = truncated_weight(inputs.logp_proximal_N, inputs.logp_behaviour_N, config.is_cap)
    terms, sums = loss.function(inputs, weight_N, config)
    if loss.level == "token":
        terms = reduce_tokens(terms, inputs.sequence_N, config)
    return LossOutputs(total=terms.sum(), sums=sums)


def reduce_tokens(loss_N: Tensor, sequence_N: Tensor, config: LossConfig) -> Tensor:
    """[N]: per-token losses weighed so that their sum over `divisor` is the reduction asked for."""
    if config.reduction != "sequence":
        return loss_N
    lengths_S = torch.bincount(sequence_N)
    return loss_N / lengths_S[sequence_N]


def divisor(config: LossConfig, counts: Counts) -> float:
    """See `base.denominator`."""
    return denominator(LOSSES[config.kind].level, config, counts)
