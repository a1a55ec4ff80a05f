"""A world in which everything about a policy is a sum: prompts with 125 completions each, scored by a rule, and a softmax
table.

The policy of a prompt is the enumerable one of `learner/objective/enumerable.py`; a world has K of them in one table. Worlds of
several seeds lie side by side in the same tensors, so that all seeds are trained in one pass.

Axes: S seeds, K prompts, Y = 125 completions, C = 31 prefixes, V = 5 tokens; of `enumerable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rlhf.learner.objective import enumerable

NUM_PROMPTS = 8
# The proxy is the gold reward but for this share of the completions, which it takes to be this much better than they are: about
# as much as the best completion is better than the mean.
OVERRATED, BONUS = 0.1, 3.0
_INITIAL_SCALE = 0.5


@dataclass(frozen=True)
class Worlds:
    """float64 gold, proxy [S, K, Y]; logits of the initial policies [S, K, C, V], which are also their references."""

    seeds: tuple[int, ...]
    gold: Tensor
    proxy: Tensor
    initial: Tensor


def make_worlds(seeds: Sequence[int]) -> Worlds:
    """The world of a seed does not depend on those beside it."""
    made = [_world(seed) for seed in seeds]
    gold, proxy, initial = (torch.stack(each) for each in zip(*made, strict=True))
    return Worlds(tuple(seeds), gold, proxy, initial)


def _world(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gold: the sum of a score for each pair of neighbouring tokens (and for the first token), other scores for each prompt."""
    generator = torch.Generator().manual_seed(seed)
    v, t = enumerable.V, enumerable.T
    scores = torch.randn(NUM_PROMPTS, v + 1, v, dtype=torch.float64, generator=generator) / t**0.5
    before = torch.cat([torch.full((enumerable.Y, 1), v), enumerable.COMPLETIONS[:, :-1]], dim=1)
    gold = scores[:, before, enumerable.COMPLETIONS].sum(-1)
    overrated = torch.rand(gold.shape, generator=generator) < OVERRATED
    initial = _INITIAL_SCALE * torch.randn(NUM_PROMPTS, enumerable.C, v, dtype=torch.float64, generator=generator)
    return gold, gold + BONUS * overrated, initial


def expected(logits: Tensor, reward: Tensor) -> Tensor:
    """float64 [S]: the exact expected reward, the mean over prompts."""
    return (enumerable.probabilities(logits) * reward).sum(-1).mean(-1)


def progress(logits: Tensor, initial: Tensor, reward: Tensor) -> Tensor:
    """float64 [S]: expected reward, as a share of the way from the initial policy's to the best completion's of every
    prompt."""
    start = expected(initial, reward)
    return (expected(logits, reward) - start) / (reward.amax(-1).mean(-1) - start)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """float64 [S]: KL(policy, other) of a completion in nats, the mean over prompts."""
    of_completions = (enumerable.logprobs(logits) - enumerable.logprobs(other)).sum(-1)
    return (enumerable.probabilities(logits) * of_completions).sum(-1).mean(-1)


def gradient(logits: Tensor, reward: Tensor) -> Tensor:
    """float64 [S, K, C, V]: of each seed's expected reward."""
    leaf = logits.detach().clone().requires_grad_()
    expected(leaf, reward).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def state_values(logits: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [S, K, C] twice: the expected reward from each prefix on, and how often a token follows that prefix (summing to 1
    over the prefixes of a prompt). What a critic should say, and how much it matters."""
    p = enumerable.probabilities(logits)
    worth, often = [], []
    for t in range(enumerable.T):
        blocks = (*p.shape[:-1], enumerable.V**t, -1)
        mass = p.reshape(blocks).sum(-1)
        worth.append((p * reward).reshape(blocks).sum(-1) / mass)
        often.append(mass / enumerable.T)
    return torch.cat(worth, -1), torch.cat(often, -1)
