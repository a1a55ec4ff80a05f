"""Slow twins, as close to the notation as code can be: one number at a time, no packing, no padding, no tricks.

Called by tests only. Each says of which function it is the twin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from buffers.record import Group
from learner.config import LossConfig


def group_relative(rewards: Sequence[float | None], *, scale_by_std: bool) -> list[float | None]:
    """Twin of `learner.advantages.group_relative`."""
    counting = [reward for reward in rewards if reward is not None]
    if len(counting) < 2 or statistics.pstdev(counting) < 1e-6:
        return [None if reward is None else 0.0 for reward in rewards]
    mean, std = statistics.mean(counting), statistics.pstdev(counting)
    return [None if reward is None else (reward - mean) / (std if scale_by_std else 1.0) for reward in rewards]


def ratio(logp_a: float, logp_b: float) -> float:
    """Twin of `learner.corrections.ratio`, of one token."""
    return math.exp(max(-20.0, min(20.0, logp_a - logp_b)))


def effective_sample_size(weights: Sequence[float]) -> float:
    """Twin of `learner.corrections.effective_sample_size`."""
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))


def ppo_clip(current: float, proximal: float, behaviour: float, advantage: float, config: LossConfig) -> float:
    """Twin of `learner.losses.ppo_clip`: the loss of one token from its three log-probabilities."""
    weight = 1.0 if config.is_cap is None else min(ratio(proximal, behaviour), config.is_cap)
    r = ratio(current, proximal)
    clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
    surrogate = min(r * advantage, clipped * advantage)
    if advantage < 0:
        surrogate = max(surrogate, config.dual_clip * advantage)
    return -weight * surrogate


def completion_logprobs(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """[T], with gradient: one plain forward pass over one prompt and one completion, nothing else in the batch."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    chosen = []
    for t, token in enumerate(completion):
        # position i predicts the token at i + 1, so completion token t is predicted at len(prompt) + t - 1
        chosen.append(torch.log_softmax(logits[len(prompt) + t - 1] / temperature, dim=-1)[token])
    return torch.stack(chosen)


def loss(
    model: torch.nn.Module, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], config: LossConfig
) -> Tensor:
    """Scalar with gradient: mean PPO-clip loss over all tokens of members that count, proximal = current."""
    losses = []
    for group, rollout, advantage in members(groups, advantages):
        current = completion_logprobs(model, group.prompt_ids.tolist(), rollout.completion_ids.tolist(), group.temperature)
        for logp, behaviour in zip(current, rollout.logprobs.tolist(), strict=True):
            weight = 1.0 if config.is_cap is None else min(ratio(float(logp.detach()), behaviour), config.is_cap)
            losses.append(-weight * advantage * (logp - logp.detach()).exp())
    return torch.stack(losses).mean()


def members(groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]) -> Iterator[tuple]:  # type: ignore[type-arg]
    """(group, rollout, advantage) of every completion that counts, in order."""
    for group, values in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            if advantage is not None:
                yield group, rollout, advantage
