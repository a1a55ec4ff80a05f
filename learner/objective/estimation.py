"""Advantage estimation: from rewards, and where needed an evaluation of every completion under the policy, to token targets.

Pure, in numpy. Axes: T tokens of one completion; N tokens of all that an estimator is given, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from async_rlhf.buffers.composition import EPSILON
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Float32Array, Group, Rollout
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.objective.advantages import Tokens, best, drop_constant, normalised, pair
from async_rlhf.learner.objective.corrections import kl_penalty, second_moment_mask
from async_rlhf.learner.objective.objective import importance_weight
from async_rlhf.learner.registry import advantage_spec, load_function, loss_spec

Rewards = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class PolicyEvaluation:
    """An evaluation of one completion before the first update of a step; float32 [T], None for values the run does not need."""

    logp_proximal: Float32Array
    """Under the learner's own policy."""
    logp_reference: Float32Array | None = None
    """Under the frozen reference."""
    value: Float32Array | None = None
    """The critic's estimate of the return from just before each token on."""
    energy: Float32Array | None = None
    """|d log p / dz|^2 of each token, z the logits."""


@dataclass(frozen=True)
class TokenTargets:
    """Targets of one completion's tokens, where a number per completion is not enough; float32 [T]."""

    observed: PolicyEvaluation | None = None
    """None where the step requested no evaluation."""
    advantage: Float32Array | None = None
    """Replaces the completion's own advantage."""
    mask: Float32Array | None = None
    """A factor on the token's weight, from corrections over the whole batch. A token with 0 still counts in divisors."""
    returns: Float32Array | None = None
    """The critic is fitted to them."""

    def named(self) -> dict[str, Float32Array]:
        """The values beside the advantage that are not None, under a micro-batch's names."""
        seen = self.observed
        observed = {} if seen is None else {name: each for name, each in vars(seen).items() if name != "energy"}
        found = {"mask": self.mask, "return": self.returns, **observed}
        return {f"{name}_N": each for name, each in found.items() if each is not None}


Evaluated = Mapping[int, PolicyEvaluation]


@dataclass(frozen=True)
class AdvantageEstimates:
    """advantages[g][m], None for a completion left out; targets by the completion's index in the batch."""

    advantages: Rewards
    targets: Mapping[int, TokenTargets]

    @property
    def zero_advantage_groups(self) -> int:
        """Groups without a completion that has an advantage: all left out, or none better than another."""
        return sum(
            not any(self._has_advantage(index, advantage) for index, advantage in enumerate(group, first))
            for first, group in _numbered(self.advantages)
        )

    def _has_advantage(self, index: int, advantage: float | None) -> bool:
        target = self.targets.get(index)
        of_tokens = None if target is None else target.advantage  # they may differ, and have a mean of 0
        return advantage is not None and float(np.abs(advantage if of_tokens is None else of_tokens).max()) >= EPSILON


def _numbered(groups: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Each group with the place in the batch of its first member."""
    first = 0
    for group in groups:
        yield first, group
        first += len(group)


def _counting(rewards: Rewards) -> dict[int, float]:
    """The rewards that are not None, by the completion's index in the batch."""
    return {index: reward for index, reward in enumerate(chain.from_iterable(rewards)) if reward is not None}


def _nested(numbers: Mapping[int, float], like: Rewards) -> list[list[float | None]]:
    """Numbers by index in the batch, regrouped by group and member."""
    return [[numbers.get(index) for index in range(first, first + len(group))] for first, group in _numbered(like)]


def without_truncated(groups: Sequence[Group], rewards: Rewards) -> list[list[float | None]]:
    """The rewards of the completions that are not truncated (`is_truncated`); None for the others.

    Leaving these out is the overlong filtering of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4).
    """
    return [
        [None if rollout.is_truncated else reward for rollout, reward in zip(group.rollouts, own, strict=True)]
        for group, own in zip(groups, rewards, strict=True)
    ]


def num_masked(groups: Sequence[Group], rewards: Rewards, loss: LossConfig) -> int:
    """Completions with a reward that leave the loss because they were cut."""
    return len(_counting(rewards)) - len(_counting(without_truncated(groups, rewards))) if loss.mask_truncated else 0


def select_members(
    groups: Sequence[Group], rewards: Rewards, advantage: AdvantageConfig, loss: LossConfig
) -> list[list[float | None]]:
    """The rewards of the completions to learn from; None for the others. What is left out still counts in baselines. Where a
    teacher is learned from, 0 for all of which no score failed."""
    learns_from = loss_spec(loss.kind).learns_from
    if learns_from == "teacher":
        scores = ((rollout.scores.values() for rollout in group.rollouts) for group in groups)
        chosen = [[None if any(score.failure for score in own) else 0.0 for own in group] for group in scores]
    else:
        chosen = drop_constant(rewards) if advantage.constant_groups != "keep" else [list(group) for group in rewards]
    if loss.mask_truncated:
        chosen = without_truncated(groups, chosen)
    if learns_from in ("all", "teacher"):
        return chosen
    return [pair(group) if learns_from == "pair" else best(group) for group in chosen]


def estimate_advantages(
    groups: Sequence[Group],
    rewards: Rewards,
    chosen: Rewards,
    evaluated: Evaluated,
    advantage: AdvantageConfig,
    loss: LossConfig,
) -> AdvantageEstimates:
    """Advantages from all rewards, for the completions in `chosen`; token targets for those in `evaluated`, and for all where
    the estimator gives every token an advantage of its own."""
    kept, from_teacher = _counting(chosen), loss_spec(loss.kind).learns_from == "teacher"
    if from_teacher or (advantage.level == "completion" and advantage_spec(advantage.kind).level == "group"):
        # a teacher's advantage of each token is found in the loss
        values = kept if from_teacher else _counting(_from_rewards(_penalised(rewards, evaluated, loss), advantage))
        targets = {index: TokenTargets(seen) for index, seen in evaluated.items()}
    else:
        by_token = _of_tokens(groups, rewards, chosen, evaluated, advantage, loss)
        targets = {index: replace(by_token[index], observed=evaluated.get(index)) for index in kept}
        # a completion's own advantage, for the record, is the mean of its tokens'
        values = {index: float(each.advantage.mean()) for index, each in targets.items() if each.advantage is not None}
    estimates = AdvantageEstimates(_nested({index: values[index] for index in kept}, chosen), targets)
    if loss.second_moment is None and not loss.is_normalised:
        return estimates
    return _masked([rollout for group in groups for rollout in group.rollouts], estimates, evaluated, loss)


def _of_tokens(
    groups: Sequence[Group],
    rewards: Rewards,
    chosen: Rewards,
    evaluated: Evaluated,
    advantage: AdvantageConfig,
    loss: LossConfig,
) -> dict[int, TokenTargets]:
    """By index, for all completions that count: an advantage for each token, from one of three comparisons."""
    if advantage.needs_energy:
        return _from_siblings(groups, rewards, evaluated, advantage, loss)
    if advantage.level == "turn":
        return _from_turns(groups, _penalised(rewards, evaluated, loss), advantage)
    counting = _counting(chosen if advantage.needs_critic else rewards)
    return _from_tokens([rollout for group in groups for rollout in group.rollouts], counting, evaluated, advantage, loss)


def check_estimator(config: AdvantageConfig) -> None:
    """Call the estimator once on made-up rewards. Raises ConfigError when it raises, or its result is unusable.

    Found here, the defect ends a run before its first step; later the groups of the batch would be suspected.
    """
    rewards: Rewards = [[0.0, 1.0, None, 0.5], [1.0, 1.0, 1.0, 1.0], [None, None], [2.0]]
    of_tokens = [np.array([0.0, 0.0, 1.0], np.float32), np.array([-1.0], np.float32)]
    load_function("advantage", config.kind)
    try:
        given: list[Any]
        if config.needs_energy:
            given = [each.tolist() for each in _of_members([0.0, 1.0, 0.5], [*of_tokens, of_tokens[0]], config)]
        elif advantage_spec(config.kind).level == "tokens":
            values, log_ratios = ([each * factor for each in of_tokens] for factor in (0.5, 0.1))
            estimates = token_estimates(of_tokens, config, values, log_ratios)
            given = [each.tolist() for one in estimates for each in (one.advantage, one.returns) if each is not None]
        else:
            given = _from_rewards(rewards, config)
        if not np.isfinite([number for each in given for number in each if number is not None]).all():
            raise ValueError(f"gave {given}")
    except Exception as error:
        raise ConfigError(f"advantage.kind = {config.kind!r} cannot be used: {type(error).__name__}: {error}") from error


def _estimator(config: AdvantageConfig) -> Callable[..., Any]:
    """The function with its settings."""
    return partial(load_function("advantage", config.kind), **config.arguments)


def _from_rewards(rewards: Rewards, config: AdvantageConfig) -> list[list[float | None]]:
    function = _estimator(config)
    values = [function(group) for group in rewards]
    for group, estimates in zip(rewards, values, strict=True):
        if [value is None for value in estimates] != [reward is None for reward in group]:
            raise ValueError(
                f"advantage.kind = {config.kind!r} gave {list(estimates)} for the rewards {list(group)}: it must give one "
                "number for each reward, and None where the reward is None"
            )
    return [list(own) for own in values]


def turn_returns(rollout: Rollout, reward: float) -> list[float]:
    """The return of each turn t: R_t = r + sum of s_k over k >= t, the reward plus the environment's scores of this and later
    turns; for an agent R_t = r + s_t, since its calls belong to several conversations."""
    turns, scores = len(rollout.turn_lengths), rollout.turn_scores
    if len(scores) == turns:
        return [reward + (score or 0.0) for score in scores]
    returns = [reward]
    for score in reversed(scores or (None,) * (turns - 1)):
        returns.append(returns[-1] + (score or 0.0))
    return returns[::-1]


def _from_turns(groups: Sequence[Group], rewards: Rewards, config: AdvantageConfig) -> dict[int, TokenTargets]:
    """By index: turn t of a completion is compared with turn t of those of its group that count and have one."""
    function, targets = _estimator(config), dict[int, TokenTargets]()
    for group, (first, members) in zip(groups, _numbered(rewards), strict=True):
        returns = [[] if r is None else turn_returns(rollout, r) for rollout, r in zip(group.rollouts, members, strict=True)]
        turns = range(max(map(len, returns)))
        advantages = [function([of_one[t] if t < len(of_one) else None for of_one in returns]) for t in turns]
        for member, (rollout, of_one) in enumerate(zip(group.rollouts, returns, strict=True)):
            if of_one:
                of_turns = [advantages[t][member] for t in range(len(of_one))]
                repeated = np.repeat(of_turns, rollout.turn_lengths).astype(np.float32)
                targets[first + member] = TokenTargets(advantage=repeated)
    return targets


def _from_siblings(
    groups: Sequence[Group], rewards: Rewards, evaluated: Evaluated, config: AdvantageConfig, loss: LossConfig
) -> dict[int, TokenTargets]:
    """By index: each token of a completion is compared with the same token of those of its group that count."""
    targets = dict[int, TokenTargets]()
    for group, (first, members) in zip(groups, _numbered(rewards), strict=True):
        counting = {first + member: reward for member, reward in enumerate(members) if reward is not None}
        energies = [_energy(group.rollouts[index - first], evaluated.get(index), loss) for index in counting]
        if energies:
            advantages = _of_members([*counting.values()], energies, config)
            targets |= {index: TokenTargets(advantage=one) for index, one in zip(counting, advantages, strict=True)}
    return targets


def _energy(rollout: Rollout, seen: PolicyEvaluation | None, loss: LossConfig) -> Float32Array:
    """float32 [T]: of the gradient that each token gives, times its importance weight."""
    if seen is None or seen.energy is None:
        raise ValueError("advantages of tokens compared with siblings' need an evaluation of all that count")
    alone = torch.zeros(rollout.num_tokens, dtype=torch.int64)
    columns = torch.from_numpy(seen.logp_proximal), torch.from_numpy(rollout.logprobs), alone
    energy: Float32Array = seen.energy * importance_weight(*columns, loss).numpy() ** 2
    return energy


def _of_members(rewards: Sequence[float], energies: Sequence[Float32Array], config: AdvantageConfig) -> Sequence[Float32Array]:
    """Raises ValueError for an estimator that does not give a number for each token."""
    found: Sequence[Float32Array] = _estimator(config)(rewards, energies)
    if [np.shape(each) for each in found] != [each.shape for each in energies]:
        raise ValueError(f"advantage.kind = {config.kind!r} must give a number for each token of each completion")
    return found


def _penalised(rewards: Rewards, evaluated: Evaluated, loss: LossConfig) -> Rewards:
    """Rewards less the divergence from the reference, summed over each completion's tokens, where `kl_in` puts it there."""
    if not loss.kl_in_reward:
        return rewards
    costs = {index: float(_costs(evaluated.get(index), loss).sum()) for index in _counting(rewards)}
    return _nested({index: reward - costs[index] for index, reward in _counting(rewards).items()}, rewards)


def _costs(seen: PolicyEvaluation | None, loss: LossConfig) -> Float32Array:
    """float32 [T]: the penalty of each token for the divergence from the reference."""
    if seen is None or seen.logp_reference is None:
        raise ValueError("loss.kl_coef needs log-probabilities under the reference")
    penalty = kl_penalty(seen.logp_proximal, seen.logp_reference, loss.kl_estimator)
    return (loss.kl_coef * penalty).astype(np.float32)


def _from_tokens(
    rollouts: Sequence[Rollout],
    counting: Mapping[int, float],
    evaluated: Evaluated,
    config: AdvantageConfig,
    loss: LossConfig,
) -> dict[int, TokenTargets]:
    """By index: a completion's reward stands at its last token, less what each token costs; of one of several pieces at the
    last token of each, so that the length of one discounts nothing in another."""
    rewards, values, log_ratios = list[Float32Array](), list[Float32Array](), list[Float32Array]()
    lengths: list[list[int]] = []
    for index, reward in counting.items():
        seen, rollout = evaluated.get(index), rollouts[index]
        rewards.append(-_costs(seen, loss) if loss.kl_in_reward else np.zeros(rollout.num_tokens, np.float32))
        lengths.append(rollout.piece_lengths)
        rewards[-1][np.cumsum(lengths[-1]) - 1] += reward
        if config.needs_critic:
            if seen is None or seen.value is None:
                raise ValueError(f"advantage.kind = {config.kind!r} needs a critic's values")
            values.append(seen.value)
            log_ratios.append(seen.logp_proximal - rollout.logprobs)
    return dict(zip(counting, token_estimates(rewards, config, values, log_ratios, lengths), strict=True))


def token_estimates(
    rewards: Sequence[Float32Array],
    config: AdvantageConfig,
    values: Sequence[Float32Array] = (),
    log_ratios: Sequence[Float32Array] = (),
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[TokenTargets]:
    """Advantages of each completion, and with a critic, scaled over the batch as configured, with the returns that it is fitted
    to: from the reward and the critic's value at each token, and the log-ratio proximal / behaviour there; float32 [T].
    lengths: of the pieces of each, over which nothing passes; None: one each.
    """
    if not rewards:
        return []
    whole = [len(each) for each in rewards]
    pieces = whole if lengths is None else [*chain.from_iterable(lengths)]
    end_N = np.zeros(sum(whole), np.bool_)
    end_N[np.cumsum(pieces) - 1] = True
    value_N, log_ratio_N = (np.concatenate([np.zeros(0, np.float32), *each]) for each in (values, log_ratios))
    estimates = _estimator(config)(Tokens(np.concatenate(rewards), value_N, log_ratio_N, end_N, np.repeat(whole, whole)))
    advantage_N, return_N = estimates if config.needs_critic else (estimates, None)
    for numbers in (advantage_N,) if return_N is None else (advantage_N, return_N):
        if np.shape(numbers) != end_N.shape:
            raise ValueError(f"gave numbers of the shape {np.shape(numbers)} for {len(end_N)} tokens")
    borders = np.cumsum(whole)[:-1]
    if return_N is None:
        return [TokenTargets(advantage=each) for each in np.split(advantage_N, borders)]
    scaled = np.split(normalised(advantage_N) if config.normalise else advantage_N, borders)
    return [
        TokenTargets(advantage=own, returns=fitted) for own, fitted in zip(scaled, np.split(return_N, borders), strict=True)
    ]


def _masked(
    rollouts: Sequence[Rollout], estimates: AdvantageEstimates, evaluated: Evaluated, loss: LossConfig
) -> AdvantageEstimates:
    """The second-moment mask, and one over the mean of the importance weights, over all tokens of the batch."""
    counted = sorted(evaluated.keys() & _counting(estimates.advantages).keys())
    if not counted:
        return estimates
    lengths = [len(evaluated[index].logp_proximal) for index in counted]
    proximal_N = np.concatenate([evaluated[index].logp_proximal for index in counted])
    behaviour_N = np.concatenate([rollouts[index].logprobs for index in counted])
    mask_N = np.ones(len(proximal_N), np.float32)
    if loss.second_moment is not None:
        mask_N = second_moment_mask(proximal_N - behaviour_N, loss.second_moment).astype(np.float32)
    if loss.is_normalised:
        mask_N /= _mean_weight(proximal_N, behaviour_N, lengths, loss)
    parts = np.split(mask_N, np.cumsum(lengths)[:-1])
    masked = {index: replace(estimates.targets[index], mask=part) for index, part in zip(counted, parts, strict=True)}
    return AdvantageEstimates(estimates.advantages, {**estimates.targets, **masked})


def _mean_weight(proximal_N: Float32Array, behaviour_N: Float32Array, lengths: Sequence[int], loss: LossConfig) -> np.float32:
    """The mean over tokens, or over completions where each has one weight; without NaN, which refuses the step by itself."""
    sequence_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    weight_N = importance_weight(torch.from_numpy(proximal_N), torch.from_numpy(behaviour_N), sequence_N, loss).numpy()
    of_completions = loss.is_level != "token" or loss_spec(loss.kind).level == "sequence"
    weights = weight_N[np.cumsum(lengths) - 1] if of_completions else weight_N
    return np.float32(np.nanmean(weights, dtype=np.float64))
