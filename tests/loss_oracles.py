"""Slow twins of every loss with its corrections: one completion, one token at a time, close to the papers.

Log-probabilities of the current policy are scalars with a gradient, so a twin gives value and gradient both.
Called by tests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig


@dataclass(frozen=True)
class Completion:
    """Scalars by token; `current` are float64 leaves."""

    current: list[Tensor]
    proximal: list[float]
    behaviour: list[float]
    reference: list[float]
    staleness: list[int]
    advantage: float
    group: int

    def __len__(self) -> int:
        return len(self.current)

    def between(self, t: int, config: LossConfig) -> float:
        """log p_proximal of token t."""
        if config.proximal == "recompute":
            return self.proximal[t]
        alpha = (max(1, self.staleness[t]) - 1) / max(1, self.staleness[t])
        return self.behaviour[t] + alpha * (float(self.current[t].detach()) - self.behaviour[t])


def objective(completions: Sequence[Completion], config: LossConfig) -> Tensor:
    """Twin of `async_rlhf.learner.objective.objective` over `denominator`: the whole batch's loss, with gradient."""
    is_of_tokens = config.kind not in {"online_dpo", "gspo", "proximal_rloo"}
    if config.kind == "online_dpo":
        own = online_dpo(completions, config)
    elif config.kind in {"gspo", "proximal_rloo"}:
        terms = [of_sequence(completion, config) for completion in completions]
        own = sum(terms, torch.zeros(())) / len(completions)
    else:
        own = reduced([[of_token(c, t, config) for t in range(len(c))] for c in completions], config)
    if config.kl_coef > 0:
        of_tokens = [[kl(c, t, config) for t in range(len(c))] for c in completions]
        own = own + config.kl_coef * (
            reduced(of_tokens, config) if is_of_tokens else of_completions(of_tokens, completions, config)
        )
    return own


def of_completions(terms: Sequence[Sequence[Tensor]], completions: Sequence[Completion], config: LossConfig) -> Tensor:
    """Beside a loss of whole completions a term per token is averaged over each completion."""
    per_sequence = torch.stack([torch.stack(list(each)).mean() for each in terms])
    return per_sequence.sum() / (len({c.group for c in completions}) if config.kind == "online_dpo" else len(completions))


def reduced(terms: Sequence[Sequence[Tensor]], config: LossConfig) -> Tensor:
    if config.reduction == "sequence":
        return torch.stack([torch.stack(list(each)).mean() for each in terms]).mean()
    total = torch.stack([term for each in terms for term in each]).sum()
    if config.reduction == "fixed":
        return total / (len(terms) * (config.fixed_length or 1))
    return total / sum(len(each) for each in terms)


def of_token(c: Completion, t: int, config: LossConfig) -> Tensor:
    """The loss of one token."""
    logp, now, a = c.current[t], c.current[t].detach(), c.advantage
    proximal, behaviour = c.between(t, config), c.behaviour[t]
    mask = kept(c, t, config)
    match config.kind:
        case "decoupled_ppo":
            return -weight(c, t, config) * mask * surrogate(exp(logp - proximal), a, config)
        case "ppo_clip":
            return -mask * surrogate(exp(logp - behaviour), a, config)
        case "cispo":
            return -weight(c, t, config) * mask * exp(now - proximal).clamp(max=1 + config.clip_high) * a * logp
        case "truncated_is":
            w = torch.ones((), dtype=torch.float64) if config.is_cap is None else exp(now - behaviour).clamp(max=config.is_cap)
            return -mask * w * a * logp
        case "topr":
            whole = sum((float(c.current[i].detach()) - c.behaviour[i] for i in range(len(c))), 0.0)
            return -mask * (1.0 if a > 0 else min(1.0, float(exp(torch.tensor(whole, dtype=torch.float64))))) * a * logp
        case _:
            assert config.kind == "best_of_n"
            return -logp


def of_sequence(c: Completion, config: LossConfig) -> Tensor:
    """The loss of one completion, its ratio a single number."""
    old = [c.between(t, config) if config.kind == "gspo" else c.behaviour[t] for t in range(len(c))]
    logs = torch.stack([logp - o for logp, o in zip(c.current, old, strict=True)])
    r = exp(logs.mean() if config.kind == "gspo" else logs.sum())
    return -(weight(c, 0, config) if config.kind == "gspo" else 1.0) * kept(c, 0, config) * surrogate(r, c.advantage, config)


def online_dpo(completions: Sequence[Completion], config: LossConfig) -> Tensor:
    losses = []
    for group in sorted({c.group for c in completions}):
        members = [c for c in completions if c.group == group]
        best, worst = max(members, key=lambda c: c.advantage), min(members, key=lambda c: c.advantage)
        h_best = sum((p - q for p, q in zip(best.current, best.reference, strict=True)), torch.zeros(()))
        h_worst = sum((p - q for p, q in zip(worst.current, worst.reference, strict=True)), torch.zeros(()))
        losses.append(-torch.log(torch.sigmoid(config.dpo_beta * (h_best - h_worst))))
    return torch.stack(losses).mean()


def kl(c: Completion, t: int, config: LossConfig) -> Tensor:
    """The importance-corrected divergence term of one token."""
    x = torch.clamp(c.current[t] - c.reference[t], -20, 20)
    estimate = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[config.kl_estimator]
    w = exp(c.current[t] - c.behaviour[t])
    if config.is_cap is not None and float(w.detach()) > config.is_cap:
        w = torch.full_like(w, config.is_cap)
    return (w.detach() if config.kl_estimator == "k2" else w) * estimate


def exp(x: Tensor) -> Tensor:
    return torch.exp(torch.clamp(x, -20, 20))


def surrogate(r: Tensor, a: float, config: LossConfig) -> Tensor:
    clipped = min(max(float(r.detach()), 1 - config.clip_low), 1 + config.clip_high)
    value = r * a if float(r.detach()) * a <= clipped * a else torch.tensor(clipped * a, dtype=r.dtype)
    if a < 0 and config.dual_clip is not None and float(value.detach()) < config.dual_clip * a:
        return torch.tensor(config.dual_clip * a, dtype=r.dtype)
    return value


def log_ratios(c: Completion, config: LossConfig) -> list[float]:
    return [c.between(t, config) - c.behaviour[t] for t in range(len(c))]


def sequence_ratio(c: Completion, config: LossConfig) -> float:
    whole = sum(log_ratios(c, config))
    if config.sequence_ratio == "geometric":
        whole /= len(c)
    return float(exp(torch.tensor(whole, dtype=torch.float64)))


def weight(c: Completion, t: int, config: LossConfig) -> float:
    if config.is_cap is None:
        return 1.0
    if config.is_level == "sequence" or config.kind == "gspo":
        return min(sequence_ratio(c, config), config.is_cap)
    return min(float(exp(torch.tensor(log_ratios(c, config)[t], dtype=torch.float64))), config.is_cap)


def kept(c: Completion, t: int, config: LossConfig) -> float:
    """1 or 0: what no mask takes."""
    logs = log_ratios(c, config)
    token = float(exp(torch.tensor(logs[t], dtype=torch.float64)))
    if config.token_mask is not None and not config.token_mask[0] <= token <= config.token_mask[1]:
        return 0.0
    if config.sequence_mask is not None and not config.sequence_mask[0] <= sequence_ratio(c, config) <= config.sequence_mask[1]:
        return 0.0
    too_far = config.off_policy_delta is not None and -sum(logs) / len(logs) > config.off_policy_delta
    return 0.0 if too_far and c.advantage < 0 else 1.0
