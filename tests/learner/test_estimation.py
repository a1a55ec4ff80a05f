"""From rewards and observations to advantages and token targets: baselines of all, targets of the chosen, exact costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from making import make_group, make_rollout

from async_rlhf.buffers.record import Group
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.loop.metrics import data_metrics
from async_rlhf.learner.objective.advantages import gae, group_relative, leave_one_out
from async_rlhf.learner.objective.corrections import second_moment_mask
from async_rlhf.learner.objective.estimation import (
    AdvantageEstimates,
    PolicyEvaluation,
    TokenTargets,
    baseline_rewards,
    estimate_advantages,
    num_masked,
    select_members,
    turn_returns,
)
from async_rlhf.learner.objective.kl import kl_penalty

GROUPS = [make_group(0, [3, 1, 4], rewards=[1.0, 0.0, 0.5]), make_group(1, [2, 2, 5], rewards=[None, 2.0, -1.0])]
REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.5], [None, 2.0, -1.0]]
PLAIN = AdvantageConfig()


def observations(groups: Sequence[Group], **fields: Any) -> dict[int, PolicyEvaluation]:
    """Of every completion: proximal 0.1 above behaviour, reference 0.3 below, values rising; by index in the batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        index: PolicyEvaluation(
            logp_proximal=r.logprobs + np.float32(0.1) * (1 + index),
            logp_reference=r.logprobs - np.float32(0.3),
            value=np.linspace(0, 1, r.num_tokens, dtype=np.float32),
        )
        for index, r in enumerate(rollouts)
    }


def estimates_of(
    advantage: AdvantageConfig, loss: LossConfig, observed: dict[int, PolicyEvaluation] | None = None
) -> AdvantageEstimates:
    return estimate_advantages(
        GROUPS, REWARDS, select_members(GROUPS, REWARDS, advantage, loss), observed or {}, advantage, loss
    )


def test_without_an_observation_there_are_advantages_and_nothing_else() -> None:
    found = estimates_of(PLAIN, LossConfig())
    assert found.advantages == [group_relative(group, scale_by_std=True, std="sample") for group in REWARDS]
    assert found.targets == {} and found.zero_advantage_groups == 0


def test_the_baseline_is_of_all_that_count_also_of_those_that_are_left_out() -> None:
    found = estimates_of(AdvantageConfig(kind="leave_one_out"), LossConfig(kind="online_dpo"))
    first, second = leave_one_out(REWARDS[0]), leave_one_out(REWARDS[1])
    assert found.advantages == [[first[0], first[1], None], [None, second[1], second[2]]]


def test_a_divergence_taken_from_the_reward_costs_each_completion_its_own() -> None:
    loss = LossConfig(kl_coef=0.2, kl_in="reward", kl_estimator="k1")
    observed = observations(GROUPS)
    found = estimates_of(AdvantageConfig(scale_by_std=False), loss, observed)
    costs = [0.2 * float((seen.logp_proximal - seen.logp_reference).sum()) for seen in observed.values()]
    penalised = [[1.0 - costs[0], 0.0 - costs[1], 0.5 - costs[2]], [None, 2.0 - costs[4], -1.0 - costs[5]]]
    expected = [group_relative(group, scale_by_std=False, std="sample") for group in penalised]
    for values, wanted in zip(found.advantages, expected, strict=True):
        assert values == [None if each is None else pytest.approx(each, abs=1e-5) for each in wanted]


def test_a_critic_gives_every_token_its_own_advantage_and_return() -> None:
    config = AdvantageConfig(kind="gae", normalise=False, gamma=0.9, lam=0.8)
    observed = observations(GROUPS)
    found = estimates_of(config, LossConfig(), {index: seen for index, seen in observed.items() if index != 3})
    assert sorted(found.targets) == [0, 1, 2, 4, 5]  # a failed score has no advantage
    rewards = np.array([0, 0, 1], np.float32)
    advantage, returns = gae(rewards, observed[0].value, gamma=0.9, lam=0.8)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.targets[0].advantage, advantage, rtol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.targets[0].returns, returns, rtol=1e-6)  # type: ignore[arg-type]
    assert found.advantages[0][0] == pytest.approx(float(advantage.mean()))
    assert found.advantages[1][0] is None


def test_a_critics_rewards_pay_the_divergence_token_by_token() -> None:
    loss = LossConfig(kl_coef=0.2, kl_in="reward", kl_estimator="k3")
    config = AdvantageConfig(kind="gae", normalise=False, gamma=1.0, lam=1.0)
    seen = observations(GROUPS)[2]
    found = estimates_of(config, loss, observations(GROUPS))
    cost = 0.2 * kl_penalty(seen.logp_proximal, seen.logp_reference, "k3")  # type: ignore[arg-type]
    rewards = np.array([0, 0, 0, 0.5]) - cost
    left = np.cumsum(rewards[::-1])[::-1]  # with gamma and lambda 1 the return is what is still to come
    np.testing.assert_allclose(found.targets[2].returns, left, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["v_trace", "traced"])
def test_traces_take_the_ratio_of_proximal_to_behaviour_and_end_with_each_completion(kind: str) -> None:
    config = AdvantageConfig.model_validate({"kind": kind, "normalise": False})
    together = estimates_of(config, LossConfig(), observations(GROUPS))
    alone = estimate_advantages([GROUPS[1]], [REWARDS[1]], [REWARDS[1]],
                    {i - 3: seen for i, seen in observations(GROUPS).items() if i >= 3}, config, LossConfig())  # fmt: skip
    for index in (4, 5):
        assert np.array_equal(together.targets[index].returns, alone.targets[index - 3].returns)  # type: ignore[arg-type]
    on_policy = {i: PolicyEvaluation(r.logprobs, None, observations(GROUPS)[i].value)
                 for i, r in enumerate(r for g in GROUPS for r in g.rollouts)}  # fmt: skip
    fresh = estimates_of(config, LossConfig(), on_policy)
    off = estimates_of(
        config, LossConfig(), {i: PolicyEvaluation(s.logp_proximal - 2, None, s.value) for i, s in on_policy.items()}
    )
    assert not np.allclose(fresh.targets[0].returns, off.targets[0].returns)  # type: ignore[arg-type]


def test_normalised_over_the_tokens_of_the_batch() -> None:
    found = estimates_of(AdvantageConfig(kind="gae"), LossConfig(), observations(GROUPS))
    tokens = np.concatenate([target.advantage for target in found.targets.values() if target.advantage is not None])
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6) and float(tokens.std()) == pytest.approx(1, abs=1e-5)


def test_the_second_moment_mask_sees_the_whole_batch() -> None:
    observed = observations(GROUPS)
    found = estimates_of(PLAIN, LossConfig(second_moment=0.05), observed)
    rollouts = [rollout for group in GROUPS for rollout in group.rollouts]
    counted = [0, 1, 2, 4, 5]
    logs = np.concatenate([observed[i].logp_proximal - rollouts[i].logprobs for i in counted])
    mask = np.concatenate([found.targets[i].mask for i in counted])  # type: ignore[misc]
    assert mask.tolist() == second_moment_mask(logs, 0.05).astype(float).tolist()
    assert 0 < mask.sum() < len(mask)  # of the farther completions tokens are masked, of the nearer none
    assert found.targets[3].mask is None


CUT = [make_group(0, [3, 1, 4], truncated=[1]), make_group(1, [2, 2, 5], truncated=[0, 1, 2])]
CUT_REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.4], [1.0, 0.0, 0.0]]


def masked(mask_truncated: str, kind: str = "leave_one_out", loss_kind: str = "decoupled_ppo") -> AdvantageEstimates:
    loss = LossConfig.model_validate({"mask_truncated": mask_truncated, "kind": loss_kind})
    advantage = AdvantageConfig.model_validate({"kind": kind})
    rewards = baseline_rewards(CUT, CUT_REWARDS, loss)
    return estimate_advantages(CUT, rewards, select_members(CUT, rewards, advantage, loss), {}, advantage, loss)


def test_a_cut_completion_leaves_the_loss_and_its_reward_the_baseline_only_where_asked() -> None:
    plain, gone = leave_one_out(CUT_REWARDS[0]), leave_one_out([1.0, 0.4])
    assert masked("off").advantages == [plain, leave_one_out(CUT_REWARDS[1])]
    assert masked("loss").advantages == [[plain[0], None, plain[2]], [None, None, None]]
    assert masked("loss and baseline").advantages == [[gone[0], None, gone[1]], [None, None, None]]
    assert masked("off").zero_advantage_groups == 0 and masked("loss").zero_advantage_groups == 1
    assert [num_masked(CUT, CUT_REWARDS, LossConfig(mask_truncated=mask)) for mask in ("off", "loss")] == [0, 4]


def test_best_and_worst_are_chosen_among_those_that_were_not_cut() -> None:
    found = masked("loss", loss_kind="online_dpo").advantages
    assert [[value is not None for value in group] for group in found] == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize(("mask", "counted"), [("off", 17), ("loss", 17), ("loss and baseline", 7)])
def test_the_statistics_of_a_batch_have_the_tokens_of_all_in_the_baseline(mask: str, counted: int) -> None:
    found = masked(mask, "reinforce_pp")
    cut = mask == "loss and baseline"
    tokens = [
        value
        for group, own in zip(CUT, CUT_REWARDS, strict=True)
        for rollout, value in zip(group.rollouts, own, strict=True)
        for _ in range(rollout.num_tokens)
        if value is not None and not (cut and rollout.finish_reason == "length")
    ]
    assert len(tokens) == counted
    wanted = (1.0 - np.mean(tokens)) / np.std(tokens)
    np.testing.assert_allclose(found.targets[0].advantage, [wanted] * 3, rtol=1e-5)  # type: ignore[arg-type]
    assert found.advantages[0][0] == pytest.approx(float(wanted), rel=1e-5)
    assert sorted(found.targets) == ([0, 1, 2, 3, 4, 5] if mask == "off" else [0, 2])


def test_a_divergence_in_the_reward_costs_a_token_what_is_still_to_come_in_reinforce_pp() -> None:
    loss, observed = LossConfig(kl_coef=0.2, kl_in="reward", kl_estimator="k1"), observations(GROUPS)
    found = estimates_of(AdvantageConfig(kind="reinforce_pp"), loss, observed)
    rewards = {0: 1.0, 1: 0.0, 2: 0.5, 4: 2.0, 5: -1.0}
    costs = {i: 0.2 * (observed[i].logp_proximal - observed[i].logp_reference) for i in rewards}  # type: ignore[operator]
    returns = {i: r - np.cumsum(costs[i][::-1])[::-1] for i, r in rewards.items()}
    every = np.concatenate(list(returns.values()))
    for i, own in returns.items():
        np.testing.assert_allclose(found.targets[i].advantage, (own - every.mean()) / every.std(), rtol=1e-3, atol=1e-4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log-probabilities under the reference"):
        estimates_of(AdvantageConfig(kind="reinforce_pp"), loss, {0: observed[0]})


def test_a_turn_is_compared_with_the_same_turn_of_its_siblings() -> None:
    """Three members of three, two and two turns, the last of which does not count."""
    long = replace(make_rollout(9, spans=[(0, 2), (None, 1), (0, 1), (None, 2), (0, 3)]), turn_scores=(0.25, None))
    short = replace(make_rollout(5, spans=[(0, 1), (None, 2), (0, 2)]), turn_scores=(1.0,))
    group = replace(make_group(0, [1, 1, 1]), rollouts=(long, short, short))
    rewards: list[list[float | None]] = [[0.5, 1.0, None]]
    assert turn_returns(long, 0.5) == [0.75, 0.5, 0.5] and turn_returns(short, 1.0) == [2.0, 1.0]
    advantage = AdvantageConfig(kind="leave_one_out", level="turn")
    found = estimate_advantages([group], rewards, rewards, {}, advantage, LossConfig())
    of_tokens = [found.targets[index].advantage for index in (0, 1)]
    assert [each.tolist() for each in of_tokens if each is not None] == [
        [0.75 - 2.0] * 2 + [0.5 - 1.0] + [0.0] * 3,  # no sibling has a third turn
        [2.0 - 0.75] + [1.0 - 0.5] * 2,
    ]
    assert found.advantages[0][2] is None and 2 not in found.targets


def test_without_scores_of_turns_a_completion_of_one_turn_has_the_advantage_of_a_completion() -> None:
    by_turn = estimate_advantages(GROUPS, REWARDS, REWARDS, {}, AdvantageConfig(level="turn"), LossConfig())
    whole = estimates_of(PLAIN, LossConfig())
    flat = [advantage for group in whole.advantages for advantage in group]
    for index, target in by_turn.targets.items():
        assert target.advantage is not None
        assert target.advantage.tolist() == pytest.approx([flat[index]] * len(target.advantage))
    assert by_turn.targets.keys() == {index for index, advantage in enumerate(flat) if advantage is not None}


@pytest.mark.parametrize(("reason", "is_cut"), [("stop", False), ("length", True), ("context", True), ("max_turns", False)])
def test_what_a_budget_of_tokens_ended_was_cut_and_a_game_played_to_its_last_turn_was_not(reason: str, is_cut: bool) -> None:
    group = make_group(0, [3, 1, 4])
    ended = replace(group, rollouts=tuple(replace(rollout, finish_reason=reason) for rollout in group.rollouts))  # type: ignore[arg-type]
    rewards = [[1.0, 0.0, 0.4]]
    assert num_masked([ended], rewards, LossConfig(mask_truncated="loss")) == 3 * is_cut
    assert data_metrics([ended], rewards, 0, 0)["completions/clipped_ratio"] == float(is_cut)


def test_groups_whose_rewards_are_all_equal_have_no_advantage_though_they_are_kept() -> None:
    groups = [make_group(n, [2, 2, 2]) for n in range(3)]
    rewards: list[list[float | None]] = [[0.1, 0.1, 0.1], [0.7, None, None], [0.1, 0.1, 0.2]]
    for kind in ("group_relative", "leave_one_out"):
        advantage = AdvantageConfig.model_validate({"kind": kind})
        assert estimate_advantages(groups, rewards, rewards, {}, advantage, LossConfig()).zero_advantage_groups == 2
    by_token = TokenTargets(advantage=np.array([1.0, -1.0], np.float32))
    assert AdvantageEstimates([[0.0], [0.0]], {1: by_token}).zero_advantage_groups == 1, "a mean of 0 is no advantage of 0"
