"""Slow twins of every loss with its corrections: one completion, one token at a time, close to the papers.

Log-probabilities of the current policy are scalars with a gradient, so a twin gives value and gradient both. The twin of a new
loss is its formula alone, in one of the three tables. Called by tests only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.registry import loss_spec

LONGEST = 7
"""Tokens that a completion counts for where the reduction is `fixed`."""


@dataclass(frozen=True)
class Completion:
    """Scalars by token; `current` are float64 leaves, and so are `likeliest`: of other tokens in its place."""

    current: list[Tensor]
    proximal: list[float]
    behaviour: list[float]
    reference: list[float]
    staleness: list[int]
    advantage: float
    group: int
    likeliest: list[list[Tensor]] = field(default_factory=list)
    taught: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.current)

    def now(self, t: int) -> Tensor:
        """log p_current of token t, without its gradient."""
        return self.current[t].detach()

    def between(self, t: int, config: LossConfig) -> float:
        """log p_proximal of token t."""
        if config.proximal == "recompute":
            return self.proximal[t]
        alpha = (max(1, self.staleness[t]) - 1) / max(1, self.staleness[t])
        return self.behaviour[t] + alpha * (float(self.now(t)) - self.behaviour[t])


def objective(completions: Sequence[Completion], config: LossConfig) -> Tensor:
    """Twin of `async_rlhf.learner.objective.objective` over `denominator`: the whole batch's loss, with gradient."""
    groups = [[c for c in completions if c.group == group] for group in sorted({c.group for c in completions})]
    if config.kind in OF_PAIRS:
        pairs = [(max(group, key=lambda c: c.advantage), min(group, key=lambda c: c.advantage)) for group in groups]
        own = torch.stack([OF_PAIRS[config.kind](*pair, config) for pair in pairs]).mean()
    elif config.kind in OF_COMPLETIONS:
        own = torch.stack([correction(c, 0, config) * OF_COMPLETIONS[config.kind](c, config) for c in completions]).mean()
    else:
        of_token = OF_TOKENS[config.kind]
        own = reduced([[correction(c, t, config) * of_token(c, t, config) for t in range(len(c))] for c in completions], config)
    if config.kl_coef > 0:
        of_tokens = [[kl(c, t, config) for t in range(len(c))] for c in completions]
        if config.kind in OF_TOKENS:
            own = own + config.kl_coef * reduced(of_tokens, config)
        else:  # beside a loss of whole completions a term per token is averaged over each completion
            per_completion = torch.stack([torch.stack(each).mean() for each in of_tokens])
            own = own + config.kl_coef * per_completion.sum() / len(groups if config.kind in OF_PAIRS else completions)
    return own


def reduced(terms: Sequence[Sequence[Tensor]], config: LossConfig) -> Tensor:
    if config.reduction == "sequence":
        return torch.stack([torch.stack(list(each)).mean() for each in terms]).mean()
    total = torch.stack([term for each in terms for term in each]).sum()
    if config.reduction == "fixed":
        return total / (len(terms) * LONGEST)
    return total / sum(len(each) for each in terms)


def decoupled_ppo(c: Completion, t: int, config: LossConfig) -> Tensor:
    return -surrogate(exp(c.current[t] - c.between(t, config)), c.advantage, config)


def ppo_clip(c: Completion, t: int, config: LossConfig) -> Tensor:
    return -surrogate(exp(c.current[t] - c.behaviour[t]), c.advantage, config)


def cispo(c: Completion, t: int, config: LossConfig) -> Tensor:
    return -exp(c.now(t) - c.between(t, config)).clamp(max=1 + config.clip_high) * c.advantage * c.current[t]


def truncated_is(c: Completion, t: int, config: LossConfig) -> Tensor:
    ratio = 1.0 if config.is_cap is None else exp(c.now(t) - c.behaviour[t]).clamp(max=config.is_cap)
    return -ratio * c.advantage * c.current[t]


def dppo_tv(c: Completion, t: int, config: LossConfig) -> Tensor:
    p, mu = math.exp(float(c.now(t))), math.exp(c.behaviour[t])
    return 0 * c.current[t] if leads_away(c, t) and abs(p - mu) > config.parameters["delta"] else truncated_is(c, t, config)


def dppo_kl(c: Completion, t: int, config: LossConfig) -> Tensor:
    p, mu = math.exp(float(c.now(t))), math.exp(c.behaviour[t])
    divergence = mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p)) if p < 1 else math.inf
    return 0 * c.current[t] if leads_away(c, t) and divergence > config.parameters["delta"] else truncated_is(c, t, config)


def leads_away(c: Completion, t: int) -> bool:
    """Whether an ascent of A log p leads further from the policy that sampled."""
    return c.advantage > 0 if c.now(t) > c.behaviour[t] else c.advantage < 0


def ipo(c: Completion, t: int, config: LossConfig) -> Tensor:
    far = abs(math.exp(float(c.now(t))) - math.exp(c.behaviour[t])) > config.parameters["epsilon"]
    return 0 * c.current[t] if far else truncated_is(c, t, config)


def sao(c: Completion, t: int, config: LossConfig) -> Tensor:
    r = float(exp(c.now(t) - c.behaviour[t]))
    return -(r if config.parameters["low"] <= r <= config.parameters["high"] else 0.0) * c.advantage * c.current[t]


def sapo(c: Completion, t: int, config: LossConfig) -> Tensor:
    tau = config.parameters["tau"][0 if c.advantage > 0 else 1]
    return -4 / tau / (1 + torch.exp(-tau * (exp(c.current[t] - c.between(t, config)) - 1))) * c.advantage


def vespo(c: Completion, t: int, config: LossConfig) -> Tensor:
    which = 0 if c.advantage >= 0 else 1
    k, lam = (config.parameters[name][which] for name in ("k", "lam"))
    w = float(exp(sum((c.now(i) - c.behaviour[i] for i in range(len(c))), torch.zeros((), dtype=torch.float64))))
    return -(w**k) * math.exp(lam * (1 - w)) * c.advantage * c.current[t]


def topr(c: Completion, t: int, config: LossConfig) -> Tensor:
    whole = sum((c.now(i) - c.behaviour[i] for i in range(len(c))), torch.zeros((), dtype=torch.float64))
    return -(1.0 if c.advantage > 0 else exp(whole).clamp(max=1.0)) * c.advantage * c.current[t]


def best_of_n(c: Completion, t: int, config: LossConfig) -> Tensor:
    return -c.current[t]


def reverse_kl(c: Completion, t: int, config: LossConfig) -> Tensor:
    weight = 1.0 if config.is_cap is None else float(exp(c.now(t) - c.behaviour[t]).clamp(max=config.is_cap))
    return -weight * (c.reference[t] - float(c.now(t))) * c.current[t]


def forward_kl(c: Completion, t: int, config: LossConfig) -> Tensor:
    teacher, own = (math.exp(min(20, x - c.behaviour[t])) for x in (c.reference[t], float(c.now(t))))
    cap = config.parameters["cap"]
    return -(min(teacher, cap) - min(own, cap)) * c.current[t]


def reverse_kl_top_k(c: Completion, t: int, config: LossConfig) -> Tensor:
    rest = 1 - sum(torch.exp(p) for p in c.likeliest[t])
    compared = sum(torch.exp(p) * (p - q) for p, q in zip(c.likeliest[t], c.taught[t], strict=True))
    return compared + rest * torch.log(rest / (1 - sum(map(math.exp, c.taught[t]))))


def gspo(c: Completion, config: LossConfig) -> Tensor:
    logs = torch.stack([logp - c.between(t, config) for t, logp in enumerate(c.current)])
    return -surrogate(exp(logs.mean()), c.advantage, config)


def proximal_rloo(c: Completion, config: LossConfig) -> Tensor:
    logs = torch.stack([logp - old for logp, old in zip(c.current, c.behaviour, strict=True)])
    return -surrogate(exp(logs.sum()), c.advantage, config)


def oapl(c: Completion, config: LossConfig) -> Tensor:
    return (config.parameters["beta"] * sum(p - q for p, q in zip(c.current, c.behaviour, strict=True)) - c.advantage) ** 2


def online_dpo(best: Completion, worst: Completion, config: LossConfig) -> Tensor:
    h_best, h_worst = (
        sum((p - q for p, q in zip(c.current, c.reference, strict=True)), torch.zeros(())) for c in (best, worst)
    )
    return -torch.log(torch.sigmoid(config.parameters["beta"] * (h_best - h_worst)))


OF_TOKENS: dict[str, Callable[[Completion, int, LossConfig], Tensor]] = {
    f.__name__: f for f in (decoupled_ppo, ppo_clip, cispo, truncated_is, dppo_tv, dppo_kl, ipo, sapo, vespo, topr, best_of_n)
} | {f.__name__: f for f in (sao, reverse_kl, forward_kl, reverse_kl_top_k)}
OF_COMPLETIONS: dict[str, Callable[[Completion, LossConfig], Tensor]] = {f.__name__: f for f in (gspo, proximal_rloo, oapl)}
OF_PAIRS: dict[str, Callable[[Completion, Completion, LossConfig], Tensor]] = {"online_dpo": online_dpo}


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


def sequence_ratio(c: Completion, config: LossConfig, *, geometric: bool = True) -> float:
    whole = sum(log_ratios(c, config))
    if geometric:
        whole /= len(c)
    return float(exp(torch.tensor(whole, dtype=torch.float64)))


def correction(c: Completion, t: int, config: LossConfig) -> float:
    """What a term of a loss is multiplied by, as it declares."""
    corrects = loss_spec(config.kind).corrects
    return {"weights and masks": weight(c, t, config) * kept(c, t, config), "masks": kept(c, t, config)}.get(corrects, 1.0)


def weight(c: Completion, t: int, config: LossConfig) -> float:
    if config.is_cap is None:
        return 1.0
    if config.is_level != "token" or config.kind in OF_COMPLETIONS:
        return min(sequence_ratio(c, config, geometric=config.is_level != "product"), config.is_cap)
    return min(float(exp(torch.tensor(log_ratios(c, config)[t], dtype=torch.float64))), config.is_cap)


def kept(c: Completion, t: int, config: LossConfig) -> float:
    """1 or 0: what no mask takes."""
    logs = log_ratios(c, config)
    token = float(exp(torch.tensor(logs[t], dtype=torch.float64)))
    if config.token_mask is not None and not config.token_mask[0] <= token <= config.token_mask[1]:
        return 0.0
    if config.sequence_mask is not None and not config.sequence_mask[0] <= sequence_ratio(c, config) <= config.sequence_mask[1]:
        return 0.0
    ratios = [float(exp(torch.tensor(each, dtype=torch.float64))) for each in logs]
    k = [r - 1 - math.log(r) for r in ratios]
    if config.divergence_mean is not None and sum(k) / len(k) > config.divergence_mean:
        return 0.0
    if config.divergence_max is not None and max(k) > config.divergence_max:
        return 0.0
    too_far = config.off_policy_delta is not None and -sum(logs) / len(logs) > config.off_policy_delta
    return 0.0 if too_far and c.advantage < 0 else 1.0
