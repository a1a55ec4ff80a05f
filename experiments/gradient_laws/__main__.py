"""`python -m async_rlhf.experiments.gradient_laws`: bias and spread of each correction's gradient against the exact on-policy
gradient, over how far the data are behind, and of distillation; the tables of `docs/learner.md`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective import enumerable as policy
from async_rlhf.learner.objective.corrections import second_moment_mask
from async_rlhf.learner.objective.objective import LossInputs, importance_weight
from async_rlhf.learner.registry import loss_spec, losses

STALENESS = (0, 1, 4, 8, 16, 32)
# A cap that nothing reaches: the untruncated estimator.
_OPEN = 1e9


@dataclass(frozen=True)
class Case:
    """One line: a loss with its corrections. scale: what its gradient is times that of a sum over tokens."""

    name: str
    config: LossConfig
    scale: float = 1.0


_SCALES = {"gspo": 1 / policy.T, "oapl": 2.0}
CASES: Sequence[Case] = (
    Case("none (decoupled PPO without weight)", LossConfig(is_cap=None)),
    Case("token weight, not truncated", LossConfig(is_cap=_OPEN)),
    Case("token weight, truncated at 2", LossConfig(is_cap=2.0)),
    Case("token weight, truncated at 2, mean 1", LossConfig(is_cap=2.0, is_normalised=True)),
    Case("token weight 2, mask 0.5 to 2 (IcePop)", LossConfig(is_cap=2.0, token_mask=(0.5, 2.0))),
    Case("second-moment mask 0.04 (M2PO), token weight", LossConfig(is_cap=_OPEN, second_moment=0.04)),
    Case("sequence weight, not truncated", LossConfig(is_cap=_OPEN, is_level="product")),
    Case("sequence weight, truncated at 2", LossConfig(is_cap=2.0, is_level="product")),
    Case("sequence weight, geometric, truncated at 2", LossConfig(is_cap=2.0, is_level="sequence")),
    Case("token weight 2, sequence mask, geometric 0.8 to 1.25", LossConfig(sequence_mask=(0.8, 1.25))),
    Case("token weight 2, off-policy sequence mask 0.1", LossConfig(off_policy_delta=0.1)),
    Case("token weight 2, mask of mean divergence 0.02", LossConfig(divergence_mean=0.02)),
    Case("token weight 2, mask of largest divergence 0.1", LossConfig(divergence_max=0.1)),
    Case("decoupled PPO, proximal interpolated", LossConfig(proximal="interpolate")),
    *(
        Case(f"`{kind}`", LossConfig(kind=kind), _SCALES.get(kind, 1.0))
        for kind in losses()
        if loss_spec(kind).learns_from == "all" and kind != LossConfig().kind
    ),
)


DISTILLED: Sequence[Case] = (
    Case("reverse KL without weight", LossConfig(kind="reverse_kl", is_cap=None)),
    Case("reverse KL, truncated at 2", LossConfig(kind="reverse_kl")),
    Case("reverse KL, not truncated", LossConfig(kind="reverse_kl", is_cap=_OPEN)),
    Case("forward KL, truncated at 10", LossConfig(kind="forward_kl")),
    Case("forward KL, truncated at 2", LossConfig(kind="forward_kl", cap=2.0)),
    Case("reverse KL, all 5 tokens", LossConfig(kind="reverse_kl_top_k")),
    Case("reverse KL, likeliest 2 tokens", LossConfig(kind="reverse_kl_top_k", top_k=2)),
)


def measure(case: Case, current: Tensor, behaviour: Tensor, reward: Tensor, staleness: int) -> tuple[float, float]:
    """Bias |E g - g*| / |g*|, and spread sqrt(trace Cov g) / |g*| of the gradient of one completion.

    Exact, by summing over all completions with behaviour's probabilities; the advantage is reward minus behaviour's mean.
    """
    weights = policy.probabilities(behaviour)
    inputs = policy.inputs_for(current, behaviour, reward - (weights * reward).sum(), staleness)
    if case.config.second_moment is not None:
        inputs = _with_second_moment(inputs, case.config.second_moment)
    if case.config.is_normalised:
        inputs = _normalised(inputs, case.config, weights)
    mean, spread = _moments(policy.gradients(inputs, case.config, current) / case.scale, weights)
    exact = policy.exact_gradient(current, reward)
    return float((mean - exact).norm() / exact.norm()), spread / float(exact.norm())


def _moments(gradients: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Mean of the gradients [Y, P] under these probabilities [Y], and the square root of their covariance's trace."""
    mean = (weights[:, None] * gradients).sum(0)
    return mean, math.sqrt(float((weights * (gradients - mean).square().sum(1)).sum()))


def distilled(case: Case, current: Tensor, behaviour: Tensor, teacher: Tensor) -> tuple[float, float, float]:
    """Bias against the exact descent of the divergence from the teacher, behind the prefixes that the policy writes and behind
    those of the data; and the spread of one completion, in units of the former."""
    weights = policy.probabilities(behaviour)
    nothing, top_k = torch.zeros(policy.Y, dtype=torch.float64), case.config.parameters.get("top_k", policy.V)
    inputs = policy.inputs_for(current, behaviour, nothing, 0, teacher, top_k)
    mean, spread = _moments(policy.gradients(inputs, case.config, current), weights)
    own, old = (policy.towards(current, teacher, by, forward=case.config.kind == "forward_kl") for by in (current, behaviour))
    return float((mean - own).norm() / own.norm()), float((mean - old).norm() / old.norm()), spread / float(own.norm())


def markdown() -> str:
    """The table of `docs/learner.md`: bias and spread at each staleness, and the divergence KL(current | behaviour) there."""
    reward, behaviour = policy.rewards(), policy.initial()
    currents = {steps: policy.later(behaviour, reward, steps) for steps in STALENESS}
    cells = dict[str, list[str]]()
    for case in CASES:
        measured = [measure(case, current, behaviour, reward, steps) for steps, current in currents.items()]
        cells[case.name] = [f"{bias:.2f} / {spread:.1f}" for bias, spread in measured]
    return _table("loss and correction", cells, {steps: _divergence(now, behaviour) for steps, now in currents.items()})


def markdown_of_distillation() -> str:
    """The table of `docs/learner.md`: biases and spread; from the one that sampled the policy goes to the teacher by exact
    descent of KL(policy | teacher)."""
    behaviour = policy.initial()
    teacher = policy.later(behaviour, policy.rewards(), max(STALENESS))
    current, currents = behaviour, dict[int, Tensor]()
    for steps in range(max(STALENESS) + 1):
        currents[steps] = current
        current = current + 0.5 * policy.towards(current, teacher, current, forward=False).reshape(policy.C, policy.V)
    at = {n: currents[n] for n in STALENESS}
    measured = {case.name: [distilled(case, now, behaviour, teacher) for now in at.values()] for case in DISTILLED}
    cells = {name: [f"{own:.2f} / {old:.2f} / {spread:.1f}" for own, old, spread in each] for name, each in measured.items()}
    return _table("loss", cells, {n: _divergence(now, teacher) for n, now in at.items()})


def _table(first: str, cells: Mapping[str, Sequence[str]], divergences: Mapping[int, float]) -> str:
    head = " | ".join(f"{n} ({kl:.2g} nats)" for n, kl in divergences.items())
    lines = [f"| {first} | {head} |", "|---|" + "---|" * len(divergences)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(of_one)} |" for name, of_one in cells.items())])


def _with_second_moment(inputs: LossInputs, limit: float) -> LossInputs:
    """The batch is every completion once, which is not how often they come; as a mask of a fixed batch it serves."""
    log_ratios = (inputs.logp_proximal_N - inputs.logp_behaviour_N).float().numpy()
    return replace(inputs, mask_N=torch.from_numpy(second_moment_mask(log_ratios, limit)).double())


def _normalised(inputs: LossInputs, config: LossConfig, weights: Tensor) -> LossInputs:
    """By the mean of a batch so large that it is the expectation."""
    weight_N = importance_weight(inputs.logp_proximal_N, inputs.logp_behaviour_N, inputs.sequence_N, config)
    mean = (weights * weight_N.reshape(policy.Y, policy.T).mean(1)).sum()
    return replace(inputs, mask_N=torch.full_like(weight_N, 1 / float(mean)))


def _divergence(current: Tensor, behaviour: Tensor) -> float:
    of_tokens = policy.logprobs(current).sum(1) - policy.logprobs(behaviour).sum(1)
    return float((policy.probabilities(current) * of_tokens).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{markdown()}\n\n{markdown_of_distillation()}\n")
