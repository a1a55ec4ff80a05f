"""Losses that rank the completions of a group: online DPO on best and worst, best-of-n on the best alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.loss import LossInputs


def online_dpo(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[P]: - log sigmoid(beta (h(best) - h(worst))), h(y) = log p_current(y) - log p_reference(y), for P groups.

    Rafailov et al. 2023 (arXiv 2305.18290, eq. 7) on pairs the policy wrote itself (Guo et al. 2024, arXiv 2402.04792). Which
    policy wrote them does not enter, so there is nothing to correct: of the losses compared in arXiv 2410.18252 it bears
    staleness best. Best and worst are by advantage; the trainer leaves out all others, and groups without a difference.
    """
    if inputs.logp_reference_N is None:
        raise ValueError("online_dpo needs log-probabilities under the reference")
    lengths_S = torch.bincount(inputs.sequence_N)
    h_S = torch.zeros(len(lengths_S), dtype=inputs.logp_current_N.dtype, device=inputs.logp_current_N.device)
    h_S = h_S.index_add(0, inputs.sequence_N, inputs.logp_current_N - inputs.logp_reference_N)
    worth_S = inputs.advantage_N[lengths_S.cumsum(0) - lengths_S]
    best, worst = [], []
    for group in sorted(set(inputs.group_S.tolist())):
        members = (inputs.group_S == group).nonzero().squeeze(-1)
        best.append(members[worth_S[members].argmax()])
        worst.append(members[worth_S[members].argmin()])
    margin_P = config.dpo_beta * (h_S[torch.stack(best)] - h_S[torch.stack(worst)])
    # `sums` are divided by tokens: a pair's share of tokens makes that a mean over pairs, weighed by their length
    tokens_P = (lengths_S[torch.stack(best)] + lengths_S[torch.stack(worst)]).float()
    sums = {"dpo/margin": (margin_P.detach() * tokens_P).sum(), "dpo/accuracy": ((margin_P > 0) * tokens_P).sum()}
    return -logsigmoid(margin_P), sums


def best_of_n(inputs: LossInputs, weight_N: Tensor, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """[N]: - log p_current, of the only completion that the trainer leaves in each group (arXiv 2410.18252, section 4.1).

    Who wrote it does not enter: nothing to correct.
    """
    return -inputs.logp_current_N, {}
