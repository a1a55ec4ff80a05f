"""Advantage estimation: from rewards, and where needed an evaluation of every completion under the policy, to token targets.

Pure, in numpy. Axis: T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np

from async_rlhf.buffers.composition import EPSILON
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import Float32Array, Group, Rollout
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.objective.advantages import BoolArray, best, drop_constant, normalised, pair
from async_rlhf.learner.objective.corrections import second_moment_mask
from async_rlhf.learner.objective.kl import kl_penalty
from async_rlhf.learner.registry import advantage_settings, advantage_spec, load_advantage, loss_spec

Rewards = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class AdvantageEstimates:
    """advantages[g][m], None for a completion left out; targets by the completion's index in the batch."""

    advantages: Sequence[Sequence[float | None]]
    targets: Mapping[int, TokenTargets]

    @property
    def zero_advantage_groups(self) -> int:
        """Groups without a completion that has an advantage: all left out, or none better than another."""
        have_one = map(self._has_one, count(), chain.from_iterable(self.advantages))
        return sum(not sum(islice(have_one, len(group))) for group in self.advantages)

    def _has_one(self, index: int, value: float | None) -> bool:
        of_tokens = self.targets[index].advantage if index in self.targets else None  # these may differ, and have a mean of 0
        return value is not None and float(np.abs(value if of_tokens is None else of_tokens).max()) >= EPSILON


def without_truncated(groups: Sequence[Group], rewards: Rewards) -> list[list[float | None]]:
    """The rewards of the completions that came to their end; None for those that a budget of tokens cut (`is_truncated`).

    Leaving these out is the overlong filtering of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4).
    """
    return [
        [None if rollout.is_truncated else reward for rollout, reward in zip(group.rollouts, own, strict=True)]
        for group, own in zip(groups, rewards, strict=True)
    ]


def num_masked(groups: Sequence[Group], rewards: Rewards, loss: LossConfig) -> int:
    """Completions with a reward that leave the loss because they were cut."""
    if loss.mask_truncated == "off":
        return 0
    return len(_counting(rewards)) - len(_counting(without_truncated(groups, rewards)))


def _counting(rewards: Rewards) -> dict[int, float]:
    """The rewards there are, by the completion's place in the batch."""
    return {i: r for i, r in enumerate(reward for group in rewards for reward in group) if r is not None}


def baseline_rewards(groups: Sequence[Group], rewards: Rewards, loss: LossConfig) -> Rewards:
    """The rewards that advantages are made from."""
    return without_truncated(groups, rewards) if loss.mask_truncated == "loss and baseline" else rewards


def select_members(
    groups: Sequence[Group], rewards: Rewards, advantage: AdvantageConfig, loss: LossConfig
) -> list[list[float | None]]:
    """The rewards of the completions to learn from; None for the others. What is left out still counts in baselines."""
    chosen = drop_constant(rewards) if advantage.constant_groups != "keep" else [list(group) for group in rewards]
    if loss.mask_truncated != "off":
        chosen = without_truncated(groups, chosen)
    learns_from = loss_spec(loss.kind).learns_from
    if learns_from == "all":
        return chosen
    return [pair(group) if learns_from == "pair" else best(group) for group in chosen]


def estimate_advantages(
    groups: Sequence[Group],
    rewards: Rewards,
    chosen: Rewards,
    evaluated: Mapping[int, PolicyEvaluation],
    advantage: AdvantageConfig,
    loss: LossConfig,
) -> AdvantageEstimates:
    """Advantages from all rewards, for the completions in `chosen`; token targets for those in `evaluated`, and for all where
    the estimator gives every token an advantage of its own."""
    if advantage.level == "turn":
        estimates = _from_turns(groups, _penalised(rewards, evaluated, loss), chosen, evaluated, advantage)
    elif advantage.needs_critic:
        estimates = _from_critic(groups, chosen, evaluated, advantage, loss)
    elif advantage_spec(advantage.kind).level == "token_rewards":
        estimates = _from_token_rewards(groups, rewards, chosen, evaluated, advantage, loss)
    else:
        values = _from_rewards(_penalised(rewards, evaluated, loss), advantage)
        kept = [
            [None if c is None else value for value, c in zip(group, some, strict=True)]
            for group, some in zip(values, chosen, strict=True)
        ]
        estimates = AdvantageEstimates(kept, {index: TokenTargets(seen) for index, seen in evaluated.items()})
    return estimates if loss.second_moment is None else _masked(groups, estimates, evaluated, loss.second_moment)


def check_estimator(config: AdvantageConfig) -> None:
    """Call the estimator once on made-up rewards. Raises ConfigError when it raises, or gives what no step could use.

    Found here, the defect ends a run before its first step; later the groups of the batch would be suspected.
    """
    rewards: Rewards = [[0.0, 1.0, None, 0.5], [1.0, 1.0, 1.0, 1.0], [None, None], [2.0]]
    of_tokens = [np.array([0.0, 0.0, 1.0], np.float32), np.array([-1.0], np.float32)]
    load_advantage(config.kind)
    try:
        if config.needs_critic:
            values, log_ratios = ([each * factor for each in of_tokens] for factor in (0.5, 0.1))
            found = _advantages_and_returns(of_tokens, values, log_ratios, config)
            shapes = [(np.shape(a), np.shape(r)) for a, r in found]
            if shapes != [((len(each),), (len(each),)) for each in of_tokens]:
                raise ValueError(f"gave advantages and returns of shapes {shapes} for completions of 3 and 1 tokens")
            numbers = np.concatenate([np.concatenate(each) for each in found])
        elif advantage_spec(config.kind).level == "token_rewards":
            of_each = _token_advantages(of_tokens, config)
            if [np.shape(a) for a in of_each] != [np.shape(each) for each in of_tokens]:
                raise ValueError(f"gave {sum(map(np.size, of_each))} advantages for 4 tokens")
            numbers = np.concatenate(of_each)
        else:
            numbers = np.array([n for group in _from_rewards(rewards, config) for n in group if n is not None], np.float64)
        if not np.isfinite(numbers).all():
            raise ValueError(f"gave {numbers.tolist()}, for {of_tokens if config.needs_critic else rewards}")
    except Exception as error:
        raise ConfigError(f"advantage.kind = {config.kind!r} cannot be used: {type(error).__name__}: {error}") from error


def _estimator(config: AdvantageConfig) -> Callable[..., Any]:
    """The function with its settings."""
    given = {name: getattr(config, name) for name in advantage_settings(config.kind)}
    return partial(load_advantage(config.kind), **given)


def turn_returns(rollout: Rollout, reward: float) -> list[float]:
    """Of each turn t: R_t = r + sum of s_k over k >= t, the reward and what the environment gave for it and later ones."""
    returns = [reward]
    for score in reversed(rollout.turn_scores or (None,) * (len(rollout.turn_lengths) - 1)):
        returns.append(returns[-1] + (score or 0.0))
    return returns[::-1]


def _from_turns(
    groups: Sequence[Group],
    rewards: Rewards,
    chosen: Rewards,
    evaluated: Mapping[int, PolicyEvaluation],
    config: AdvantageConfig,
) -> AdvantageEstimates:
    """Turn t of a completion is compared with turn t of those of its group that count and have one."""
    function, targets, index = _estimator(config), dict[int, TokenTargets](), 0
    for group, own, kept in zip(groups, rewards, chosen, strict=True):
        returns = [[] if r is None else turn_returns(rollout, r) for rollout, r in zip(group.rollouts, own, strict=True)]
        turns = range(max(map(len, returns)))
        advantages = [function([of_one[t] if t < len(of_one) else None for of_one in returns]) for t in turns]
        for member, (rollout, keeps) in enumerate(zip(group.rollouts, kept, strict=True)):
            if keeps is not None:
                lengths = rollout.turn_lengths
                of_tokens = np.repeat([advantages[t][member] for t in range(len(lengths))], lengths).astype(np.float32)
                targets[index] = TokenTargets(evaluated.get(index), advantage=of_tokens)
            index += 1
    return _of_tokens(chosen, targets)


def _from_rewards(rewards: Rewards, config: AdvantageConfig) -> list[list[float | None]]:
    function = _estimator(config)
    values = function(rewards) if advantage_spec(config.kind).level == "batch" else [function(group) for group in rewards]
    for group, own in zip(rewards, values, strict=True):
        if [value is None for value in own] != [reward is None for reward in group]:
            raise ValueError(
                f"advantage.kind = {config.kind!r} gave {list(own)} for the rewards {list(group)}: it must give one number for "
                "each reward, and None where the reward is None"
            )
    return [list(own) for own in values]


def _penalised(rewards: Rewards, evaluated: Mapping[int, PolicyEvaluation], loss: LossConfig) -> Rewards:
    """Rewards less the divergence from the reference, summed over each completion's tokens, where `kl_in` puts it there."""
    if not loss.kl_in_reward:
        return rewards
    flat = [reward for group in rewards for reward in group]
    less = iter([None if r is None else r - float(_costs(evaluated.get(index), loss).sum()) for index, r in enumerate(flat)])
    return [[next(less) for _ in group] for group in rewards]


def _costs(seen: PolicyEvaluation | None, loss: LossConfig) -> Float32Array:
    """float32 [T]: what each token loses of its reward to the divergence from the reference."""
    if seen is None or seen.logp_reference is None:
        raise ValueError("loss.kl_coef needs log-probabilities under the reference")
    penalty = kl_penalty(seen.logp_proximal, seen.logp_reference, loss.kl_estimator)
    return (loss.kl_coef * penalty).astype(np.float32)


def _token_rewards(rollout: Rollout, reward: float, seen: PolicyEvaluation | None, loss: LossConfig) -> Float32Array:
    """float32 [T]: a completion's reward stands at its last token, less what each token costs."""
    of_tokens = -_costs(seen, loss) if loss.kl_in_reward else np.zeros(rollout.num_tokens, np.float32)
    of_tokens[-1] += reward
    return of_tokens


def _from_token_rewards(
    groups: Sequence[Group],
    rewards: Rewards,
    chosen: Rewards,
    evaluated: Mapping[int, PolicyEvaluation],
    config: AdvantageConfig,
    loss: LossConfig,
) -> AdvantageEstimates:
    """Token advantages of the completions in `chosen`, from the tokens of all that count."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counting = _counting(rewards)
    of_tokens = [_token_rewards(rollouts[i], reward, evaluated.get(i), loss) for i, reward in counting.items()]
    found = dict(zip(counting, _token_advantages(of_tokens, config), strict=True))
    return _of_tokens(chosen, {i: TokenTargets(evaluated.get(i), advantage=found[i]) for i in _counting(chosen)})


def _of_tokens(chosen: Rewards, targets: Mapping[int, TokenTargets]) -> AdvantageEstimates:
    """A completion's own advantage, for the record, is the mean of its tokens'."""
    means = {index: float(target.advantage.mean()) for index, target in targets.items() if target.advantage is not None}
    numbers = iter([means.get(index) for index in range(sum(map(len, chosen)))])
    return AdvantageEstimates([[next(numbers) for _ in group] for group in chosen], targets)


def _from_critic(
    groups: Sequence[Group],
    chosen: Rewards,
    evaluated: Mapping[int, PolicyEvaluation],
    config: AdvantageConfig,
    loss: LossConfig,
) -> AdvantageEstimates:
    """Token advantages and returns."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    worth = _counting(chosen)
    rewards, values, log_ratios = [], [], []
    for index, reward in worth.items():
        seen = evaluated[index]
        if seen.value is None:
            raise ValueError(f"advantage.kind = {config.kind!r} needs a critic's values")
        rewards.append(_token_rewards(rollouts[index], reward, seen, loss))
        values.append(seen.value)
        log_ratios.append(seen.logp_proximal - rollouts[index].logprobs)
    found = critic_targets(rewards, values, log_ratios, config)
    targets = {
        index: TokenTargets(evaluated[index], advantage=advantage, returns=returns)
        for index, (advantage, returns) in zip(worth, found, strict=True)
    }
    return _of_tokens(chosen, targets)


def critic_targets(
    rewards: Sequence[Float32Array],
    values: Sequence[Float32Array],
    log_ratios: Sequence[Float32Array],
    config: AdvantageConfig,
) -> list[tuple[Float32Array, Float32Array]]:
    """Advantages, scaled over the batch as configured, and returns of each completion: float32 [T] twice. From the reward and
    the value at each token and the log-ratio proximal / behaviour there."""
    found = _advantages_and_returns(rewards, values, log_ratios, config)
    if not (config.normalise and found):
        return found
    scaled = normalised(np.concatenate([advantage for advantage, _ in found]))
    cuts = np.cumsum([len(each) for each in rewards])[:-1]
    return [(advantage, returns) for advantage, (_, returns) in zip(np.split(scaled, cuts), found, strict=True)]


def _token_advantages(rewards: Sequence[Float32Array], config: AdvantageConfig) -> list[Float32Array]:
    """Of each completion: float32 [T]."""
    if not rewards:
        return []
    end_N, cuts = _ends(rewards)
    return list(np.split(_estimator(config)(np.concatenate(rewards), end_N), cuts))


def _ends(completions: Sequence[Float32Array]) -> tuple[BoolArray, list[int]]:
    """bool [N], True at the last token of each; and where to cut between them."""
    ends = np.cumsum([len(each) for each in completions])
    end_N = np.zeros(ends[-1], np.bool_)
    end_N[ends - 1] = True
    return end_N, ends[:-1].tolist()


def _advantages_and_returns(
    rewards: Sequence[Float32Array],
    values: Sequence[Float32Array],
    log_ratios: Sequence[Float32Array],
    config: AdvantageConfig,
) -> list[tuple[Float32Array, Float32Array]]:
    """Of each completion: float32 [T] twice."""
    function = _estimator(config)
    if advantage_spec(config.kind).level == "completion" or not rewards:
        return [function(r, v) for r, v in zip(rewards, values, strict=True)]
    end_N, cuts = _ends(rewards)
    advantage_N, return_N = function(np.concatenate(rewards), np.concatenate(values), np.concatenate(log_ratios), end_N)
    return list(zip(np.split(advantage_N, cuts), np.split(return_N, cuts), strict=True))


def _masked(
    groups: Sequence[Group], estimates: AdvantageEstimates, evaluated: Mapping[int, PolicyEvaluation], limit: float
) -> AdvantageEstimates:
    """The second-moment mask, over all tokens of the batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counting = [value is not None for group in estimates.advantages for value in group]
    counted = [index for index in sorted(evaluated) if counting[index]]
    if not counted:
        return estimates
    log_ratios = [evaluated[index].logp_proximal - rollouts[index].logprobs for index in counted]
    kept_N = second_moment_mask(np.concatenate(log_ratios), limit).astype(np.float32)
    parts = np.split(kept_N, np.cumsum([len(each) for each in log_ratios])[:-1])
    masked = {index: replace(estimates.targets[index], mask=part) for index, part in zip(counted, parts, strict=True)}
    return AdvantageEstimates(estimates.advantages, {**estimates.targets, **masked})


@dataclass(frozen=True)
class PolicyEvaluation:
    """Of one completion, before the first update of a step; float32 [T], None for what the run has no use for.

    logp_proximal: under the learner's own policy. logp_reference: under the frozen reference. value: the critic's
    estimate of the return from just before each token on.
    """

    logp_proximal: Float32Array
    logp_reference: Float32Array | None = None
    value: Float32Array | None = None


@dataclass(frozen=True)
class TokenTargets:
    """What one completion's tokens are worth, where a number per completion is not enough; float32 [T].

    observed: None where the step asked for no evaluation. advantage replaces the completion's own. mask (0 or 1) leaves tokens
    out of numerators only: it comes from corrections that look at the whole batch. returns are what the critic is fitted to.
    """

    observed: PolicyEvaluation | None = None
    advantage: Float32Array | None = None
    mask: Float32Array | None = None
    returns: Float32Array | None = None

    def named(self) -> dict[str, Float32Array]:
        """What there is beside the advantage, as a micro-batch names it."""
        found = {"mask": self.mask, "return": self.returns, **(vars(self.observed) if self.observed else {})}
        return {f"{name}_N": each for name, each in found.items() if each is not None}
