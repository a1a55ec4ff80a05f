"""The twin of a run: a table trained on samples of its own past, exactly so many steps old, with the learner's own objective.

Rewards become advantages by `learner/objective/estimation.py`, log-probabilities and advantages a loss by `objective`, values
are fitted by the critic's own loss, the guard is the run's. Only what brings the tokens here is missing: no queue, no engine,
no model.

All seeds are trained in one pass. A loss is a sum over tokens, so the gradient at a seed's own part of the table is that of
its own tokens, to be divided by its own denominator; Adam works on each number alone. Every seed has random numbers of its
own: uniform, one for each completion, the same in every recipe. So two recipes differ by what they do and not by their luck.

Axes: S seeds, K prompts, G groups of M members, T = 3 tokens, N tokens that reach the loss; C, V of `enumerable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from async_rlhf.experiments.tabular.world import Worlds, divergence, progress, state_values
from async_rlhf.learner.config import AdvantageConfig, CriticConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.safeguards import StalenessController
from async_rlhf.learner.model.critic import value_loss
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.estimation import critic_targets, estimate_advantages, select_members
from async_rlhf.learner.objective.loss import Counts, LossInputs, denominator
from async_rlhf.learner.objective.objective import objective
from async_rlhf.learner.step.report import StepTokens, measure

# Of every update; frozen after the synchronous run alone, see README.md.
GROUPS, MEMBERS = 8, 4
NUM_UPDATES = 256
LEARNING_RATE, CRITIC_LEARNING_RATE = 0.05, 0.1
_HISTORY = 16


@dataclass(frozen=True)
class Recipe:
    """How a table is trained. staleness: in steps, of all data of a step once there is so old a version; with a guard the hard
    bound. updates: from one step's data, each from groups of its own. `num_updates` in all, whatever makes a step."""

    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=partial(AdvantageConfig, kind="leave_one_out"))
    staleness: int = 0
    updates: int = 4
    learning_rate: float = LEARNING_RATE
    guard: GuardConfig = field(default_factory=GuardConfig)
    reward: Literal["gold", "proxy"] = "gold"
    num_updates: int = NUM_UPDATES
    groups: int = GROUPS

    @property
    def num_steps(self) -> int:
        return self.num_updates // self.updates


@dataclass
class Trained:
    """versions: logits float64 [S, K, C, V] at the start and after every step. values: the critic's [S, K, C], or None.
    targets: of each step, the staleness that each seed's data had."""

    versions: list[Tensor]
    values: Tensor | None
    targets: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """What one step learns from. drawn: int64 [S, G, M], numbers of completions; kept: bool [S, G, M], of those that reach the
    loss. The others float64 [S, G, M, T], of every token; returns and old_values where there is a critic."""

    drawn: Tensor
    kept: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    ages: Tensor
    returns: Tensor | None = None
    old_values: Tensor | None = None

    def at(self, seeds: slice, groups: slice) -> Batch:
        """Of some seeds and some of their groups."""
        part: dict[str, Any] = {name: None if each is None else each[seeds, groups] for name, each in vars(self).items()}
        return Batch(**part)


def train(worlds: Worlds, recipe: Recipe) -> Trained:
    """Every seed's table, after `num_updates` updates."""
    logits = worlds.initial.clone().requires_grad_()
    needs_critic = recipe.advantage.needs_critic
    values = torch.zeros(worlds.initial.shape[:-1], dtype=torch.float64, requires_grad=True) if needs_critic else None
    groups = [{"params": [logits], "lr": recipe.learning_rate}]
    if values is not None:
        groups.append({"params": [values], "lr": CRITIC_LEARNING_RATE})
    optimizer = torch.optim.Adam(groups, betas=LearnerConfig().adam_betas)
    luck = _uniforms(worlds, recipe)
    guards = [StalenessController(recipe.guard, 0, recipe.staleness) for _ in worlds.seeds]
    trained = Trained([worlds.initial], None)
    for step in range(recipe.num_steps):
        ages = [min(step, guard.target) for guard in guards]
        old = torch.stack([trained.versions[step - age][seed] for seed, age in enumerate(ages)])
        of_step = slice(step * recipe.updates * recipe.groups, (step + 1) * recipe.updates * recipe.groups)
        batch = sample(
            worlds, recipe, logits.detach(), old, luck[:, of_step], ages, None if values is None else values.detach()
        )
        measured = _Measured(len(worlds.seeds)) if recipe.guard.enabled else None
        for update in range(recipe.updates):
            part = batch.at(slice(None), slice(update * recipe.groups, (update + 1) * recipe.groups))
            if measured is not None:
                measured.add(logits.detach(), part, recipe.loss)
            optimizer.zero_grad()
            set_gradient(logits, part, recipe.loss)
            if values is not None:
                _set_value_gradient(values, part, recipe.advantage)
            optimizer.step()
        trained.versions.append(logits.detach().clone())
        trained.targets.append(ages)
        if measured is not None:
            for guard, metrics in zip(guards, measured.metrics(recipe.loss), strict=True):
                guard.adjust(metrics, step)
    trained.values = None if values is None else values.detach()
    return trained


def sample(
    worlds: Worlds,
    recipe: Recipe,
    proximal: Tensor,
    behaviour: Tensor,
    luck: Tensor,
    ages: Sequence[int],
    values: Tensor | None,
) -> Batch:
    """A step's data: completions of `behaviour` by the uniform numbers `luck` [S, G, M], and what they are worth."""
    _, num_groups, members = luck.shape
    prompts = torch.arange(num_groups) % behaviour.shape[1]
    below = enumerable.probabilities(behaviour).cumsum(-1)[:, prompts]
    drawn = torch.searchsorted(below, luck * below[..., -1:], right=True).clamp(max=enumerable.Y - 1)
    reward = (worlds.gold if recipe.reward == "gold" else worlds.proxy)[:, prompts].gather(-1, drawn)
    then, now, first = (_logprobs(each, drawn) for each in (behaviour, proximal, worlds.initial))
    age = torch.tensor(ages)[:, None, None, None].expand(then.shape)
    whole = torch.ones_like(drawn, dtype=torch.bool)
    if values is not None:
        seen = _values(values, drawn)
        advantages, returns = _from_critic(reward, seen, now - then, recipe.advantage)
        return Batch(drawn, whole, then, now, first, advantages, age, returns, seen)
    rewards = reward.reshape(-1, members).tolist()
    chosen = select_members((), rewards, recipe.advantage, recipe.loss)
    found = estimate_advantages((), rewards, chosen, {}, recipe.advantage, recipe.loss).advantages
    numbers = np.array([[np.nan if each is None else each for each in group] for group in found])
    each = torch.from_numpy(numbers).reshape(drawn.shape)
    return Batch(drawn, ~each.isnan(), then, now, first, each[..., None].expand(then.shape), age)


def set_gradient(logits: Tensor, batch: Batch, loss: LossConfig) -> None:
    """Of each seed's own loss, into `logits.grad`: sums over its tokens divided by its denominator."""
    inputs = loss_inputs(logits, batch)
    objective(inputs, loss).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    logits.grad /= torch.tensor([denominator(loss, _counts(kept)) for kept in batch.kept])[:, None, None, None]


def loss_inputs(logits: Tensor, batch: Batch) -> LossInputs:
    """The tokens of all seeds behind one another; groups of different seeds have different numbers."""
    kept = batch.kept
    num_kept = int(kept.sum())
    numbers = torch.arange(kept.shape[0] * kept.shape[1]).reshape(*kept.shape[:2], 1).expand(kept.shape)
    return LossInputs(
        logp_current_N=_logprobs(logits, batch.drawn)[kept].flatten(),
        logp_proximal_N=batch.proximal[kept].flatten(),
        logp_behaviour_N=batch.behaviour[kept].flatten(),
        logp_reference_N=batch.reference[kept].flatten(),
        advantage_N=batch.advantages[kept].flatten(),
        sequence_N=torch.arange(num_kept).repeat_interleave(enumerable.T),
        group_S=numbers[kept],
        staleness_N=batch.ages[kept].flatten(),
    )


def outcome(worlds: Worlds, trained: Trained, recipe: Recipe) -> list[dict[str, float]]:
    """Of each seed, exactly: gold and proxy progress (shares of the way to the best), the highest gold progress on the way, and
    divergences of a completion in nats: of the last policy from the reference, and of the policy that began the last step from
    the one that sampled its data. With a critic, how far it is from the value of the policy. staleness_mean: over steps."""
    last, first = trained.versions[-1], worlds.initial
    step = len(trained.targets) - 1
    old = torch.stack([trained.versions[step - age][seed] for seed, age in enumerate(trained.targets[-1])])
    found = {
        "gold": progress(last, first, worlds.gold),
        "proxy": progress(last, first, worlds.proxy),
        "gold_peak": torch.stack([gold for gold, *_ in history(worlds, trained)]).amax(0),
        "kl_reference": divergence(last, first),
        "kl_behaviour": divergence(trained.versions[-2], old),
        "staleness_mean": torch.tensor(trained.targets, dtype=torch.float64).mean(0),
    }
    if trained.values is not None:
        worth, often = state_values(last, worlds.gold if recipe.reward == "gold" else worlds.proxy)
        found["critic_error"] = (often * (trained.values - worth).square()).sum(-1).mean(-1).sqrt()
    return [{name: float(each[seed]) for name, each in found.items()} for seed in range(len(worlds.seeds))]


def history(worlds: Worlds, trained: Trained) -> list[tuple[Tensor, Tensor, Tensor]]:
    """[S] each: gold progress, proxy progress and divergence from the reference, at up to 17 moments from start to end."""
    every = max(1, (len(trained.versions) - 1) // _HISTORY)
    return [
        (
            progress(now, worlds.initial, worlds.gold),
            progress(now, worlds.initial, worlds.proxy),
            divergence(now, worlds.initial),
        )
        for now in trained.versions[::every]
    ]


class _Measured:
    """What the guard is shown of a step: what the learner reports of it, of each seed by itself."""

    def __init__(self, num_seeds: int) -> None:
        self._tokens: list[list[StepTokens]] = [[] for _ in range(num_seeds)]
        self._sums: list[dict[str, float]] = [{} for _ in range(num_seeds)]

    def add(self, logits: Tensor, batch: Batch, loss: LossConfig) -> None:
        """What the next update sees."""
        for seed, sums in enumerate(self._sums):
            inputs = loss_inputs(logits[seed : seed + 1], batch.at(slice(seed, seed + 1), slice(None)))
            with torch.no_grad():
                for name, each in objective(inputs, loss).sums.items():
                    sums[name] = sums.get(name, 0.0) + float(each)
            proximal_N, behaviour_N, all_N = inputs.logp_proximal_N, inputs.logp_behaviour_N, inputs.staleness_N >= 0
            self._tokens[seed].append(StepTokens(proximal_N, behaviour_N, inputs.advantage_N, inputs.staleness_N, all_N))

    def metrics(self, loss: LossConfig) -> list[Mapping[str, Any]]:
        joined = [StepTokens.joined(parts) for parts in self._tokens]
        return [
            {**measure(tokens, loss.is_cap), **{name: each / len(tokens.staleness_N) for name, each in sums.items()}}
            for tokens, sums in zip(joined, self._sums, strict=True)
        ]


def _uniforms(worlds: Worlds, recipe: Recipe) -> Tensor:
    """float64 [S, all groups of the run, M] in [0, 1)."""
    return torch.stack(
        [
            torch.rand(
                recipe.num_updates * recipe.groups,
                MEMBERS,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(1_000_000 + seed),
            )
            for seed in worlds.seeds
        ]
    )


def _logprobs(logits: Tensor, drawn: Tensor) -> Tensor:
    """[S, G, M, T]: of the tokens of the completions drawn, from logits [S, K, C, V]."""
    seeds, prompts, prefixes = _places(logits, drawn)
    return torch.log_softmax(logits, -1)[seeds, prompts, prefixes, enumerable.COMPLETIONS[drawn]]


def _values(values: Tensor, drawn: Tensor) -> Tensor:
    """[S, G, M, T]: the critic's value just before each token, from [S, K, C]."""
    return values[_places(values, drawn)]


def _places(table: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, prompt and prefix of each token; group g is of prompt g mod K."""
    num_seeds, num_groups, _ = drawn.shape
    prompts = torch.arange(num_groups) % table.shape[1]
    return torch.arange(num_seeds)[:, None, None, None], prompts[:, None, None], enumerable.PREFIXES[drawn]


def _counts(kept_GM: Tensor) -> Counts:
    """Of one seed. At least 1: where no group has a signal its gradient is 0, whatever divides it."""
    num_sequences, num_groups = int(kept_GM.sum()), int(kept_GM.any(-1).sum())
    return Counts(max(1, num_sequences * enumerable.T), max(1, num_sequences), max(1, num_groups))


def _from_critic(reward: Tensor, values: Tensor, log_ratios: Tensor, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """float64 [S, G, M, T] twice: advantages and returns; the reward stands at the last token. Scaled over each seed's own
    batch."""
    shape, zeros = values.shape, torch.zeros_like(values[..., 1:])
    columns = (torch.cat([zeros, reward[..., None]], -1), values, log_ratios)
    tokens_C = [each.reshape(shape[0], -1, shape[-1]).float().numpy() for each in columns]
    found = [critic_targets(list(r), list(v), list(ratios), config) for r, v, ratios in zip(*tokens_C, strict=True)]
    of_seeds = torch.from_numpy(np.array(found)).double()
    return of_seeds[:, :, 0].reshape(shape), of_seeds[:, :, 1].reshape(shape)


def _set_value_gradient(values: Tensor, batch: Batch, config: AdvantageConfig) -> None:
    """Of the critic's loss, per token of each seed's update."""
    assert batch.returns is not None and batch.old_values is not None
    now = _values(values, batch.drawn)
    total = value_loss(now, batch.old_values, batch.returns, config.value_clip).sum()
    tokens = batch.drawn[0].numel() * enumerable.T
    (CriticConfig().coefficient * total / tokens).backward()  # type: ignore[no-untyped-call]
