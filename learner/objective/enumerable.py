"""A policy small enough to enumerate: 5 tokens, 3 to a completion, so 125 completions and exact expectations.

Axes: Y = 125 completions, T = 3 tokens of each, N = Y T tokens in order, C = 31 prefixes, V = 5 tokens, P = C V parameters.
`...`: any axes of many such policies side by side, or none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective.objective import LossInputs, objective

V, T = 5, 3
COMPLETIONS = torch.tensor(list(product(range(V), repeat=T)))
Y = len(COMPLETIONS)
C = sum(V**t for t in range(T))


def _prefixes() -> Tensor:
    columns, offset = [], 0
    for t in range(T):
        codes = sum((COMPLETIONS[:, i] * V ** (t - 1 - i) for i in range(t)), torch.zeros(Y, dtype=torch.int64))
        columns.append(offset + codes)
        offset += V**t
    return torch.stack(columns, dim=1)


PREFIXES = _prefixes()
"""int64 [Y, T]: which of the C prefixes each token follows."""


def rewards() -> Tensor:
    """float64 [Y]: a reward for each completion, without structure."""
    return torch.randn(Y, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def initial() -> Tensor:
    """float64 [C, V]: logits."""
    return 0.5 * torch.randn(C, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def logprobs(logits: Tensor) -> Tensor:
    """float64 [..., Y, T]: of every token of every completion, from logits [..., C, V]."""
    return torch.log_softmax(logits, -1)[..., PREFIXES, COMPLETIONS]


def probabilities(logits: Tensor) -> Tensor:
    """float64 [..., Y], summing to 1."""
    return logprobs(logits).sum(-1).exp()


def exact_gradient(logits: Tensor, reward: Tensor) -> Tensor:
    """float64 [P]: of the expected reward under the policy itself."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad((probabilities(leaf) * reward).sum(), leaf)[0].flatten()


def towards(logits: Tensor, teacher: Tensor, prefixes: Tensor, *, forward: bool) -> Tensor:
    """float64 [P]: the descent of KL(policy | teacher), or `forward` of KL(teacher | policy), behind each prefix as often as
    the policy `prefixes` writes it."""
    leaf = logits.clone().requires_grad_()
    own_CV, other_CV = torch.log_softmax(leaf, -1), torch.log_softmax(teacher, -1)
    p_CV, q_CV = (other_CV, own_CV) if forward else (own_CV, other_CV)
    often_C = torch.zeros(C, dtype=torch.float64)
    often_C.index_add_(0, PREFIXES.flatten(), probabilities(prefixes).repeat_interleave(T))
    return -torch.autograd.grad((often_C * (p_CV.exp() * (p_CV - q_CV)).sum(-1)).sum(), leaf)[0].flatten()


def later(logits: Tensor, reward: Tensor, steps: int) -> Tensor:
    """The policy after `steps` of exact gradient ascent, like a learner whose data were sampled that many steps ago."""
    for _ in range(steps):
        logits = logits + 0.5 * exact_gradient(logits, reward).reshape(C, V)
    return logits


def inputs_for(
    current: Tensor, behaviour: Tensor, advantage_Y: Tensor, staleness: int, reference: Tensor | None = None, top: int = V
) -> LossInputs:
    """Every completion once, as one call of a loss; the proximal policy is the current one, as at the start of a step. top: so
    many of the likeliest tokens of each place, beside a reference."""
    now = logprobs(current).flatten()
    other_NK = None if reference is None else _likeliest(current, reference, top)
    index = torch.arange(Y)
    return LossInputs(
        logp_current_N=now.clone().requires_grad_(),
        logp_proximal_N=now,
        logp_behaviour_N=logprobs(behaviour).flatten(),
        advantage_N=advantage_Y.repeat_interleave(T),
        sequence_N=index.repeat_interleave(T),
        group_S=index,
        staleness_N=torch.full((Y * T,), staleness),
        logp_reference_N=None if reference is None else logprobs(reference).flatten(),
        logp_current_NK=None if other_NK is None else _likeliest(current, current, top),
        logp_reference_NK=other_NK,
    )


def gradients(inputs: LossInputs, config: LossConfig, logits: Tensor) -> Tensor:
    """float64 [Y, P]: the ascent direction each completion alone gives, in the unit of its sum over tokens."""
    leaf_NV = logits[PREFIXES].reshape(Y * T, V).requires_grad_()
    logp_NV = torch.log_softmax(leaf_NV, -1)
    logps = {"logp_current_N": logp_NV.gather(1, COMPLETIONS.reshape(-1, 1)).squeeze(1)}
    if inputs.logp_current_NK is not None:
        logps["logp_current_NK"] = logp_NV.topk(inputs.logp_current_NK.shape[1]).values
    (found_NV,) = torch.autograd.grad(objective(replace(inputs, **logps), config).total, leaf_NV)
    at = torch.arange(Y)[:, None], PREFIXES
    return torch.zeros(Y, C, V, dtype=torch.float64).index_put_(at, -found_NV.reshape(Y, T, V)).reshape(Y, C * V)


def _likeliest(current: Tensor, of: Tensor, top: int) -> Tensor:
    """float64 [N, K]: the log-probabilities under a policy of the tokens that are likeliest under the current one."""
    ids_CK = current.topk(min(top, V)).indices
    return torch.log_softmax(of, -1).gather(1, ids_CK)[PREFIXES].reshape(Y * T, -1)


def expected(
    config: LossConfig, current: Tensor, behaviour: Tensor, reward: Tensor, staleness: int, reference: Tensor | None = None
) -> Tensor:
    """float64 [P]: the expected ascent direction over completions of behaviour, which is the reference too where there is no
    other; the advantage is the reward less its mean there."""
    weights = probabilities(behaviour)
    worth = reward - (weights * reward).sum()
    of = behaviour if reference is None else reference
    inputs = inputs_for(current, behaviour, worth, staleness, of, config.parameters.get("top_k", V))
    return (weights[:, None] * gradients(inputs, config, current)).sum(0)
