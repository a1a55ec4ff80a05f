"""Slow twins, as close to the notation as code can be: one number at a time, no packing, no padding, no tricks.

Called by tests only. Each says of which function it is the twin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.learner.config import LossConfig


def group_relative(rewards: Sequence[float | None], *, scale_by_std: bool) -> list[float | None]:
    """Twin of `async_rlhf.learner.objective.advantages.group_relative`."""
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2 or statistics.stdev(counting) < 1e-6:
        return [None if reward is None else 0.0 for reward in rewards]
    mean, scale = statistics.mean(counting), statistics.stdev(counting) if scale_by_std else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """Twin of `async_rlhf.learner.objective.advantages.leave_one_out`."""
    found: list[float | None] = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i and other is not None]
        found.append(None if reward is None else reward - statistics.mean(others) if others else 0.0)
    return found


def optimal_token(rewards: Sequence[float], energies: Sequence[Sequence[float]], *, itself: bool = False) -> list[list[float]]:
    """Twin of `async_rlhf.learner.objective.advantages.optimal_token`; with `itself` the form of verl."""
    found: list[list[float]] = []
    for i, reward in enumerate(rewards):
        own: list[float] = []
        for t in range(len(energies[i])):
            others = [(r, e) for j, (r, e) in enumerate(zip(rewards, energies, strict=True)) if itself or j != i]
            pairs = [(r, sum(e[: t + 1])) for r, e in others if t < len(e)]
            total = sum(weight for _, weight in pairs)
            alone = leave_one_out(rewards)[i]
            own.append(alone or 0.0 if total == 0 else reward - sum(w * r for r, w in pairs) / total)
        found.append(own)
    return found


def max_rl(rewards: Sequence[float]) -> list[float | None]:
    """Twin of `async_rlhf.learner.objective.advantages.max_rl`."""
    mean = statistics.mean(rewards)
    return [reward / mean - 1 if mean > 0 else 0.0 for reward in rewards]


def oapl(rewards: Sequence[float | None], beta: float) -> list[float | None]:
    """Twin of `async_rlhf.learner.objective.advantages.oapl`."""
    counting = [reward for reward in rewards if reward is not None]
    value = beta * math.log(statistics.mean(math.exp(reward / beta) for reward in counting)) if counting else 0.0
    return [None if reward is None else reward - value for reward in rewards]


def reinforce_pp(completions: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    """Twin of `async_rlhf.learner.objective.advantages.reinforce_pp`: of each completion's rewards by token the returns, as
    written-out sums, and these over the batch."""
    returns = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in completions]
    counted = [value for own in returns for value in own]
    mean, std = statistics.mean(counted), statistics.pstdev(counted)
    return [[(value - mean) / std if std > 1e-6 else 0.0 for value in own] for own in returns]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Twin of `async_rlhf.learner.objective.advantages.gae`: A_t as the written-out sum of discounted temporal differences."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def v_trace(
    rewards: Sequence[float], values: Sequence[float], ratios: Sequence[float], gamma: float, lam: float, rho: float, c: float
) -> list[float]:
    """Twin of the targets of `async_rlhf.learner.objective.advantages.v_trace`: equation 1 of the paper as it stands."""
    after = [*values[1:], 0.0]
    targets = []
    for s in range(len(rewards)):
        target = values[s]
        for t in range(s, len(rewards)):
            traces = math.prod(lam * min(c, ratios[i]) for i in range(s, t))
            delta = min(rho, ratios[t]) * (rewards[t] + gamma * after[t] - values[t])
            target += gamma ** (t - s) * traces * delta
        targets.append(target)
    return targets


def traced(
    rewards: Sequence[float], values: Sequence[float], ratios: Sequence[float], gamma: float, lam: float, c: float
) -> list[float]:
    """Twin of the advantages of `async_rlhf.learner.objective.advantages.traced`, of one episode."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)]
    return [
        sum(
            gamma ** (k - t) * math.prod(lam * min(c, ratios[i]) for i in range(t + 1, k + 1)) * deltas[k]
            for k in range(t, len(deltas))
        )
        for t in range(len(deltas))
    ]


def second_moment_mask(log_ratios: Sequence[float], limit: float) -> list[bool]:
    """Twin of `async_rlhf.learner.objective.corrections.second_moment_mask`: drop the worst token until the mean square is
    small enough."""
    kept = list(range(len(log_ratios)))
    while kept and statistics.fmean(log_ratios[i] ** 2 for i in kept) > limit:
        kept.remove(max(kept, key=lambda i: (abs(log_ratios[i]), i)))
    return [i in kept for i in range(len(log_ratios))]


def value_loss(value: float, old: float, target: float) -> float:
    """Twin of `async_rlhf.learner.objective.objective.value_loss`, of one token."""
    held = min(max(value, old - 0.2), old + 0.2)
    return max((value - target) ** 2, (held - target) ** 2) / 2


def ratio(logp_a: float, logp_b: float) -> float:
    """Twin of `async_rlhf.learner.objective.corrections.ratio`, of one token."""
    return math.exp(max(-20.0, min(20.0, logp_a - logp_b)))


def effective_sample_size(weights: Sequence[float]) -> float:
    """Twin of `async_rlhf.learner.objective.corrections.effective_sample_size`."""
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))


def completion_logprobs(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """[T], with gradient: one plain forward pass over one prompt and one completion, nothing else in the batch."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    chosen = []
    for t, token in enumerate(completion):
        # position i predicts the token at i + 1, so completion token t is predicted at len(prompt) + t - 1
        chosen.append(torch.log_softmax(logits[len(prompt) + t - 1] / temperature, dim=-1)[token])
    return torch.stack(chosen)


def rollout_logprobs(model: torch.nn.Module, group: Group, rollout: Rollout) -> Tensor:
    """[N], with gradient, of the sampled tokens: a plain pass for each span of them, over all since the row last began."""
    chosen, at, text = [], 0, group.prompt_ids.tolist()
    for span in rollout.spans:
        own, at = rollout.completion_ids[at : at + span.num_tokens].tolist(), at + span.num_tokens
        if span.restarts:
            text = []
        if span.version is not None:
            chosen.append(completion_logprobs(model, text, own, group.sampling.temperature))
        text += own
    return torch.cat(chosen)


def loss(
    model: torch.nn.Module, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], config: LossConfig
) -> Tensor:
    """Scalar with gradient: mean PPO-clip loss over all tokens of members that count, proximal = current."""
    losses = []
    for group, rollout, advantage in members(groups, advantages):
        current = rollout_logprobs(model, group, rollout)
        behaviours = iter(rollout.logprobs.tolist())
        for logp in current:
            behaviour = next(behaviours)
            weight = 1.0 if config.is_cap is None else min(ratio(float(logp.detach()), behaviour), config.is_cap)
            losses.append(-weight * advantage * (logp - logp.detach()).exp())
    return torch.stack(losses).mean()


def members(groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]) -> Iterator[tuple]:  # type: ignore[type-arg]
    """(group, rollout, advantage) of every completion that counts, in order."""
    for group, values in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            if advantage is not None:
                yield group, rollout, advantage
