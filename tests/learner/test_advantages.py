"""From rewards and a critic's values to advantages and token targets: against twins, and with the baselines of all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from making import begun_anew, make_group, make_rollout

from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.loop.metrics import data_metrics
from async_rlhf.learner.objective.advantages import (
    Tokens,
    best,
    constant,
    drop_constant,
    gae,
    group_relative,
    leave_one_out,
    max_rl,
    normalised,
    oapl,
    pair,
    reinforce_pp,
    traced,
    v_trace,
)
from async_rlhf.learner.objective.corrections import kl_penalty, second_moment_mask
from async_rlhf.learner.objective.estimation import (
    AdvantageEstimates,
    PolicyEvaluation,
    TokenTargets,
    estimate_advantages,
    num_masked,
    select_members,
    turn_returns,
)
from async_rlhf.learner.objective.objective import value_loss

rewards = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))
groups = st.lists(st.one_of(st.none(), rewards), min_size=1, max_size=12)


def near(values: list[float | None]) -> list[object]:
    return [value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9) for value in values]


@given(groups)
@example([0.1] * 7)  # all equal, but for rounding
@example([None, 5.0, None])
@example([None, None])
@example([1e200, 0.0])  # too large to square
def test_what_a_group_is_compared_by_is_the_twin(values: list[float | None]) -> None:
    for scale in (True, False):
        assert group_relative(values, scale_by_std=scale) == near(oracles.group_relative(values, scale_by_std=scale))
    assert leave_one_out(values) == near(oracles.leave_one_out(values))


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("p", [0.02, 0.4])
def test_over_the_mean_the_expected_gradient_is_that_of_the_likelihood_up_to_an_order(n: int, p: float) -> None:
    """Of a policy that succeeds with probability p = sigmoid(theta), over all outcomes of n completions."""
    found = 0.0
    for outcomes in itertools.product((0.0, 1.0), repeat=n):
        score = [outcome - p for outcome in outcomes]  # d log p(outcome) / d theta
        advantages = max_rl(outcomes)
        assert advantages == near(oracles.max_rl(outcomes))
        probability = math.prod(p if outcome else 1 - p for outcome in outcomes)
        found += probability * sum(a * s for a, s in zip(advantages, score, strict=True) if a is not None) / n
    assert found == pytest.approx(sum((1 - p) ** (k - 1) * p * (1 - p) for k in range(1, n)))
    assert max_rl([None, 0.0]) == [None, 0.0] and max_rl([None]) == [None]
    with pytest.raises(ValueError, match=r"'max_rl' divides .* one of \[-1.0, 1.001\] is below 0.*'group_relative'"):
        max_rl([None, -1.0, 1.001])


@given(groups, st.floats(0.2, 50))
@example([None, None], 1.0)
def test_against_the_value_of_the_best_policy_nearby_is_the_twin_and_between_mean_and_best(
    values: list[float | None], beta: float
) -> None:
    found = oapl(values, beta=beta)
    assert found == near(oracles.oapl(values, beta))
    counting = [each for each in found if each is not None]
    if counting:
        assert math.fsum(math.exp(each / beta) for each in counting) / len(counting) == pytest.approx(1)
        assert max(counting) >= -1e-9 and math.fsum(counting) / len(counting) <= 1e-9
        assert oapl(values, beta=1e9) == [v if v is None else pytest.approx(v, abs=1e-4) for v in centred(values)]


def centred(values: list[float | None]) -> list[float | None]:
    return group_relative(values, scale_by_std=False)


@given(groups)
def test_a_pair_is_the_best_and_the_worst_that_count_and_constant_groups_have_none(values: list[float | None]) -> None:
    counting = [value for value in values if value is not None]
    alike = constant(values)
    assert sorted(value for value in pair(values) if value is not None) == ([] if alike else [min(counting), max(counting)])
    assert [value for value in best(values) if value is not None] == ([] if alike else [max(counting)])
    assert drop_constant([values, [0.0, 1.0], [None, 2.0]]) == [
        [None] * len(values) if alike else values, [0.0, 1.0], [None, None],
    ]  # fmt: skip


Columns = list[tuple[float, float, float]]
number = st.floats(-5, 5, width=32)
episodes = st.lists(
    st.lists(st.tuples(number, number, st.floats(-3, 3, width=32)), min_size=1, max_size=8), min_size=1, max_size=3
)
share = st.floats(0, 1)
cap = st.floats(0.2, 3)


def tokens_of(parts: Sequence[Columns]) -> Tokens:
    lengths = [len(part) for part in parts]
    columns = (np.array(column, np.float32) for column in zip(*(row for part in parts for row in part), strict=True))
    return Tokens(*columns, np.isin(np.arange(sum(lengths)), np.cumsum(lengths) - 1), np.repeat(lengths, lengths))


def close(values: object) -> object:
    return pytest.approx(values, rel=1e-3, abs=1e-3)


@given(st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=5), st.floats(0, 1))
@example([[0.5], [0.0, 0.5]], 1.0)  # returns that are all equal
def test_normalised_over_the_batch_is_the_twin(completions: list[list[float]], gamma: float) -> None:
    found = reinforce_pp(np.concatenate(completions).astype(np.float32), ends(completions), gamma=gamma)
    assert found.tolist() == close([each for own in oracles.reinforce_pp(completions, gamma) for each in own])


def of_gae(r: list[float], v: list[float], ratios: list[float], s: dict[str, float]) -> tuple[list[float], list[float]]:
    advantages = oracles.gae(r, v, s["gamma"], s["lam"])
    return advantages, [a + own for a, own in zip(advantages, v, strict=True)]


def of_v_trace(
    r: list[float], v: list[float], ratios: list[float], s: dict[str, float], mixed: bool
) -> tuple[list[float], list[float]]:
    targets = oracles.v_trace(r, v, ratios, s["gamma"], s["lam"], s["rho_cap"], s["c_cap"])
    part = s["lam"] if mixed else 1.0
    behind = [part * target + (1 - part) * own for target, own in zip([*targets[1:], 0.0], [*v[1:], 0.0], strict=True)]
    return [one + s["gamma"] * q - own for one, q, own in zip(r, behind, v, strict=True)], targets


def of_traced(r: list[float], v: list[float], ratios: list[float], s: dict[str, float]) -> tuple[list[float], list[float]]:
    advantages = oracles.traced(r, v, ratios, s["gamma"], s["lam"], s["c_cap"])
    return advantages, [own + min(s["rho_cap"], w) * a for own, w, a in zip(v, ratios, advantages, strict=True)]


TWINS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "gae": (gae, of_gae, ("gamma", "lam")),
    **{
        f"v_trace, {kind}": (
            partial(v_trace, bootstrap=kind),
            partial(of_v_trace, mixed=kind == "mixed"),
            ("gamma", "lam", "rho_cap", "c_cap"),
        )
        for kind in ("mixed", "target")
    },
    "traced": (traced, of_traced, ("gamma", "lam", "rho_cap", "c_cap")),
}


@pytest.mark.parametrize("kind", TWINS)
@given(parts=episodes, gamma=share, lam=share, rho_cap=cap, c_cap=cap)
def test_from_values_they_are_the_twins_of_each_completion_alone(kind: str, parts: list[Columns], **settings: float) -> None:
    estimate, twin, names = TWINS[kind]
    found = estimate(tokens_of(parts), **{name: settings[name] for name in names})
    expected = [twin(r, v, [math.exp(x) for x in logs], settings) for r, v, logs in (zip(*part, strict=True) for part in parts)]
    for which in (0, 1):  # advantages, and what the critic is fitted to
        assert found[which].tolist() == close([number for each in expected for number in each[which]])


def test_v_trace_by_hand() -> None:
    # two tokens, reward 1 at the end, gamma 1, lam 1, caps 1; ratios 2 and 1/2; values 0.5 and 0.2
    tokens = tokens_of([[(0.0, 0.5, math.log(2)), (1.0, 0.2, math.log(0.5))]])
    settings = {"gamma": 1.0, "lam": 1.0, "rho_cap": 1.0, "c_cap": 1.0, "bootstrap": "target"}
    advantages, targets = v_trace(tokens, **settings)  # type: ignore[arg-type]
    # v_2 = 0.2 + 0.5 (1 + 0 - 0.2) = 0.6;  v_1 = 0.5 + 1 (0 + 0.2 - 0.5) + 1 (0.6 - 0.2) = 0.6
    assert targets.tolist() == pytest.approx([0.6, 0.6])
    # A_1 = 0 + 0.6 - 0.5, A_2 = 1 + 0 - 0.2
    assert advantages.tolist() == pytest.approx([0.1, 0.8])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_normalised_advantages_have_mean_0_and_deviation_1_or_are_constant(values: list[float]) -> None:
    found = normalised(np.array(values, np.float32)).astype(np.float64)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-3) or float(found.std()) < 1e-5


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=10))
def test_the_loss_of_a_value_is_the_twin(drawn: list[tuple[float, float, float]]) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    assert value_loss(value, old, target).tolist() == pytest.approx([oracles.value_loss(*row) for row in drawn], abs=1e-9)


def test_a_value_that_has_moved_beyond_the_clip_towards_its_target_is_pulled_no_further() -> None:
    value = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    value_loss(value, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None
    # moved 0.5 towards 1: stop; moved 0.5 away from -1: back; moved 0.1: on
    assert value.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])


GROUPS = [make_group(0, [3, 1, 4], rewards=[1.0, 0.0, 0.5]), make_group(1, [2, 2, 5], rewards=[None, 2.0, -1.0])]
REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.5], [None, 2.0, -1.0]]
COUNTING = {0: 1.0, 1: 0.0, 2: 0.5, 4: 2.0, 5: -1.0}
ROLLOUTS = [rollout for group in GROUPS for rollout in group.rollouts]
# Of every completion, by index in the batch: proximal above behaviour or below, reference 0.3 below, values rising.
SEEN = {
    index: PolicyEvaluation(
        logp_proximal=r.logprobs + np.float32(0.1) * (1 + index) * (-1) ** index,
        logp_reference=r.logprobs - np.float32(0.3),
        value=np.linspace(0, 1, r.num_tokens, dtype=np.float32),
    )
    for index, r in enumerate(ROLLOUTS)
}
LOG_RATIOS = [SEEN[index].logp_proximal - r.logprobs for index, r in enumerate(ROLLOUTS)]


def estimates(
    advantage: dict[str, Any],
    loss: dict[str, Any] | None = None,
    seen: dict[int, PolicyEvaluation] | None = None,
    groups: Any = GROUPS,
    rewards: Any = REWARDS,
) -> AdvantageEstimates:
    estimator, objective = AdvantageConfig.model_validate(advantage), LossConfig.model_validate(loss or {})
    chosen = select_members(groups, rewards, estimator, objective)
    return estimate_advantages(groups, rewards, chosen, seen or {}, estimator, objective)


def of_tokens(found: AdvantageEstimates, index: int, name: str = "advantage") -> np.ndarray:
    values = getattr(found.targets[index], name)
    assert values is not None and values.dtype == np.float32
    return values  # type: ignore[no-any-return]


def test_the_baseline_is_of_all_that_count_also_of_those_that_are_left_out() -> None:
    plain = estimates({})
    assert plain.advantages == [group_relative(group, scale_by_std=True) for group in REWARDS]
    assert plain.targets == {} and plain.zero_advantage_groups == 0
    first, second = map(leave_one_out, REWARDS)
    pairs = estimates({"kind": "leave_one_out"}, {"kind": "online_dpo"}).advantages
    assert pairs == [[first[0], first[1], None], [None, second[1], second[2]]]


def test_a_divergence_taken_from_the_reward_costs_each_completion_its_own() -> None:
    loss = {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"}
    found = estimates({"scale_by_std": False}, loss, SEEN)
    cost = {i: 0.2 * (seen.logp_proximal - seen.logp_reference) for i, seen in SEEN.items()}  # type: ignore[operator]
    less = {i: reward - float(cost[i].sum()) for i, reward in COUNTING.items()}
    expected = [group_relative([less.get(3 * g + m) for m in range(3)], scale_by_std=False) for g in (0, 1)]
    for values, wanted in zip(found.advantages, expected, strict=True):
        assert values == [None if each is None else pytest.approx(each, abs=1e-5) for each in wanted]
    # and each token what is still to come, where tokens have advantages of their own
    found = estimates({"kind": "reinforce_pp"}, loss, SEEN)
    returns = {i: reward - np.cumsum(cost[i][::-1])[::-1] for i, reward in COUNTING.items()}
    every = np.concatenate(list(returns.values()))
    for i, own in returns.items():
        np.testing.assert_allclose(of_tokens(found, i), (own - every.mean()) / every.std(), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="log-probabilities under the reference"):
        estimates({"kind": "reinforce_pp"}, loss, {0: SEEN[0]})


CAPS = {"rho_cap": 1.2, "c_cap": 0.9}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("estimate", "own"),
    [(gae, {}), (traced, CAPS), (v_trace, CAPS | {"bootstrap": "mixed"}), (v_trace, CAPS | {"bootstrap": "target"})],
)
def test_a_critic_gives_every_token_its_own_advantage_normalised_over_the_batch_where_asked_and_a_return(
    estimate: Callable[..., Any], own: dict[str, Any], normalise: bool
) -> None:
    """From the ratio of proximal to behaviour, where the estimator looks at it."""
    settings = {"gamma": 0.9, "lam": 0.8, **own}
    found = estimates({"kind": estimate.__name__, "normalise": normalise, **settings}, {}, SEEN)
    assert sorted(found.targets) == list(COUNTING) and found.advantages[1][0] is None  # a failed score has no advantage
    lengths = [ROLLOUTS[i].num_tokens for i in COUNTING]
    ends = np.isin(np.arange(sum(lengths)), np.cumsum(lengths) - 1)
    rewards = np.zeros(len(ends), np.float32)
    rewards[ends] = list(COUNTING.values())
    values, ratios = (np.concatenate(each) for each in zip(*((SEEN[i].value, LOG_RATIOS[i]) for i in COUNTING), strict=True))
    advantages, returns = estimate(Tokens(rewards, values, ratios, ends, np.repeat(lengths, lengths)), **settings)
    expected = normalised(advantages) if normalise else advantages
    np.testing.assert_allclose(np.concatenate([of_tokens(found, i) for i in COUNTING]), expected, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([of_tokens(found, i, "returns") for i in COUNTING]), returns, rtol=1e-6)
    assert found.advantages[0][0] == pytest.approx(float(of_tokens(found, 0).mean()))


def test_with_a_critic_a_return_is_less_what_its_tokens_cost() -> None:
    loss = {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k3"}
    found = estimates({"kind": "gae", "gamma": 1.0, "lam": 1.0}, loss, SEEN)
    cost = 0.2 * kl_penalty(SEEN[2].logp_proximal, SEEN[2].logp_reference, "k3")  # type: ignore[arg-type]
    left = np.cumsum((np.array([0, 0, 0, 0.5]) - cost)[::-1])[::-1]  # with gamma and lambda 1 the return is what is to come
    np.testing.assert_allclose(of_tokens(found, 2, "returns"), left, rtol=1e-5, atol=1e-6)


def test_the_second_moment_mask_sees_the_whole_batch() -> None:
    found = estimates({}, {"second_moment": 0.05}, SEEN)
    logs = np.concatenate([LOG_RATIOS[i] for i in COUNTING])
    mask = np.concatenate([of_tokens(found, i, "mask") for i in COUNTING])
    assert mask.tolist() == second_moment_mask(logs, 0.05).astype(float).tolist()
    assert 0 < mask.sum() < len(mask)  # of the farther completions tokens are masked, of the nearer none
    assert found.targets[3].mask is None


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_a_mean_of_1_over_the_batch_whatever_is_masked(level: str) -> None:
    cap = 1.1
    found = estimates({}, {"is_normalised": True, "is_level": level, "is_cap": cap, "second_moment": 0.05}, SEEN)
    means = [np.full(len(LOG_RATIOS[i]), LOG_RATIOS[i].mean()) for i in COUNTING]
    of_tokens_or_one = [LOG_RATIOS[i] for i in COUNTING] if level == "token" else [each[:1] for each in means]
    weights = np.minimum(np.exp(np.concatenate(of_tokens_or_one)), cap)
    kept = second_moment_mask(np.concatenate([LOG_RATIOS[i] for i in COUNTING]), 0.05)
    mask = np.concatenate([of_tokens(found, i, "mask") for i in COUNTING])
    np.testing.assert_allclose(mask, kept / weights.mean(), rtol=1e-6)
    broken = {**SEEN, 2: replace(SEEN[2], logp_proximal=SEEN[2].logp_proximal * np.nan)}
    assert np.isfinite(of_tokens(estimates({}, {"is_normalised": True, "is_level": level}, broken), 0, "mask")).all()


@pytest.mark.parametrize("kind", ["leave_one_out", "reinforce_pp"])
def test_a_cut_completion_leaves_the_loss_where_asked_and_its_reward_stays_in_the_baseline(kind: str) -> None:
    groups = [make_group(0, [3, 1, 4], truncated=[1]), make_group(1, [2, 2, 5], truncated=[0, 1, 2])]
    rewards = [[1.0, 0.0, 0.4], [1.0, 0.0, 0.0]]
    plain, masked = (estimates({"kind": kind}, {"mask_truncated": mask}, {}, groups, rewards) for mask in (False, True))
    (first, _, third), _ = plain.advantages
    assert masked.advantages == [[first, None, third], [None, None, None]]
    assert [each.zero_advantage_groups for each in (plain, masked)] == [0, 1]
    pairs = estimates({"kind": kind}, {"mask_truncated": True, "kind": "online_dpo"}, {}, groups, rewards).advantages
    assert [[value is not None for value in group] for group in pairs] == [[True, False, True], [False] * 3]


@pytest.mark.parametrize(("reason", "is_cut"), [("stop", False), ("length", True), ("context", True), ("max_turns", False)])
def test_what_a_budget_of_tokens_ended_was_cut_and_a_game_played_to_its_last_turn_was_not(reason: str, is_cut: bool) -> None:
    group = make_group(0, [3, 1, 4])
    ended = replace(group, rollouts=tuple(replace(rollout, finish_reason=reason) for rollout in group.rollouts))  # type: ignore[arg-type]
    assert num_masked([ended], [[1.0, None, 0.4]], LossConfig(mask_truncated=True)) == 2 * is_cut
    assert data_metrics([ended], [[1.0, 0.0, 0.4]], 0, 0)["completions/clipped_ratio"] == float(is_cut)


@pytest.mark.parametrize("kind", ["reinforce_pp", "gae", "v_trace", "traced"])
def test_each_piece_of_an_episode_has_the_reward_at_its_end_and_is_estimated_as_if_it_were_alone(kind: str) -> None:
    spans = [(None, 2), (0, 3), (None, 2), (0, 2), (None, 1), (0, 2)]
    whole = begun_anew(make_rollout(12, spans=spans), [1])
    logprobs, seen = np.split(whole.logprobs, [3]), np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32)
    alone = [replace(make_rollout(length), logprobs=own) for length, own in zip((3, 4), logprobs, strict=True)]
    one, two = ([replace(make_group(0, [1]), rollouts=tuple(each))] for each in ([whole], alone))
    parts = [PolicyEvaluation(logp_proximal=p, value=v) for p, v in zip(*(np.split(each, [3]) for each in seen), strict=True)]
    settings = {"kind": kind, "gamma": 0.9}
    found = estimates(settings, {}, {0: PolicyEvaluation(logp_proximal=seen[0], value=seen[1])}, one, [[1.5]])
    wanted = estimates(settings, {}, dict(enumerate(parts)), two, [[1.5, 1.5]])
    np.testing.assert_array_equal(of_tokens(found, 0), np.concatenate([of_tokens(wanted, index) for index in (0, 1)]))


def test_a_turn_is_compared_with_the_same_turn_of_its_siblings() -> None:
    """Three members of three, two and two turns, the last of which does not count."""
    long = replace(make_rollout(9, spans=[(0, 2), (None, 1), (0, 1), (None, 2), (0, 3)]), turn_scores=(0.25, None))
    short = replace(make_rollout(5, spans=[(0, 1), (None, 2), (0, 2)]), turn_scores=(1.0,))
    group = replace(make_group(0, [1, 1, 1]), rollouts=(long, short, short))
    assert turn_returns(long, 0.5) == [0.75, 0.5, 0.5] and turn_returns(short, 1.0) == [2.0, 1.0]
    assert turn_returns(replace(long, turn_scores=(0.25, None, -1.0)), 0.5) == [0.75, 0.5, -0.5], "an agent's, each its own"
    found = estimates({"kind": "leave_one_out", "level": "turn"}, {}, {}, [group], [[0.5, 1.0, None]])
    assert [of_tokens(found, index).tolist() for index in (0, 1)] == [
        [0.75 - 2.0] * 2 + [0.5 - 1.0] + [0.0] * 3,  # no sibling has a third turn
        [2.0 - 0.75] + [1.0 - 0.5] * 2,
    ]
    assert found.advantages[0][2] is None and 2 not in found.targets


def test_without_scores_of_turns_a_completion_of_one_turn_has_the_advantage_of_a_completion() -> None:
    by_turn, whole = estimates({"level": "turn"}), estimates({})
    flat = {i: value for i, value in enumerate(value for group in whole.advantages for value in group) if value is not None}
    assert by_turn.targets.keys() == flat.keys()
    for index, value in flat.items():
        assert of_tokens(by_turn, index).tolist() == pytest.approx([value] * ROLLOUTS[index].num_tokens)


def test_groups_whose_rewards_are_all_equal_have_no_advantage_though_they_are_kept() -> None:
    groups = [make_group(n, [2, 2, 2]) for n in range(3)]
    rewards: list[list[float | None]] = [[0.1, 0.1, 0.1], [0.7, None, None], [0.1, 0.1, 0.2]]
    for kind in ("group_relative", "leave_one_out"):
        assert estimates({"kind": kind}, {}, {}, groups, rewards).zero_advantage_groups == 2
    by_token = TokenTargets(advantage=np.array([1.0, -1.0], np.float32))
    assert AdvantageEstimates([[0.0], [0.0]], {1: by_token}).zero_advantage_groups == 1, "a mean of 0 is no advantage of 0"
