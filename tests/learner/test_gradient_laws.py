"""What every correction's gradient is in expectation, exactly, by enumerating all completions of a small policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rlhf.experiments.gradient_laws.__main__ import CASES, Case, markdown, measure
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective import enumerable as policy

REWARD = policy.rewards()
BEHAVIOUR = policy.initial()
BY_NAME = {case.name: case for case in CASES}
ONE_STEP, FAR = policy.later(BEHAVIOUR, REWARD, 1), policy.later(BEHAVIOUR, REWARD, 16)
CURRENTS = {1: ONE_STEP, 16: FAR}


def test_the_closed_form_jacobian_is_that_of_autograd() -> None:
    for temperature in (0.7, 1.0):
        columns = torch.autograd.functional.jacobian(lambda x, t=temperature: policy.logprobs(x, t).flatten(), BEHAVIOUR)
        torch.testing.assert_close(policy.jacobian(BEHAVIOUR, temperature), columns.reshape(policy.Y * policy.T, -1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_data_of_its_own_every_estimator_is_exact_at_every_temperature(case: Case, temperature: float) -> None:
    found = policy.expected(case.config, BEHAVIOUR, BEHAVIOUR, REWARD, 0, temperature) / case.scale
    torch.testing.assert_close(found, policy.exact_gradient(BEHAVIOUR, REWARD, temperature))


def test_the_ratio_of_whole_completions_makes_stale_data_exact() -> None:
    case = BY_NAME["sequence weight, not truncated"]
    for current in CURRENTS.values():
        assert measure(case, current, BEHAVIOUR, REWARD, 1).bias < 1e-9


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_it_is_exact_only_when_ratios_are_taken_at_the_temperature_of_sampling(temperature: float) -> None:
    config = BY_NAME["sequence weight, not truncated"].config
    exact = policy.exact_gradient(FAR, REWARD, temperature)
    torch.testing.assert_close(policy.expected(config, FAR, BEHAVIOUR, REWARD, 1, temperature), exact)
    weights = policy.probabilities(BEHAVIOUR, temperature)
    inputs = policy.inputs_for(FAR, BEHAVIOUR, REWARD - (weights * REWARD).sum(), 1, temperature=1.0)
    wrong = (weights[:, None] * policy.gradients(inputs, config, FAR, temperature)).sum(0)
    assert float((wrong - exact).norm() / exact.norm()) > 0.02


def test_a_token_weight_halves_the_bias_of_none_close_by_and_truncation_trades_bias_for_spread() -> None:
    far = {name: measure(BY_NAME[name], FAR, BEHAVIOUR, REWARD, 16) for name in BY_NAME}
    near = {name: measure(BY_NAME[name], ONE_STEP, BEHAVIOUR, REWARD, 1) for name in BY_NAME}
    none, token = "none (decoupled PPO without weight)", "token weight, not truncated"
    assert near[token].bias < 0.8 * near[none].bias and far[token].bias < 0.8 * far[none].bias
    assert far["token weight, truncated at 2"].bias >= far[token].bias
    assert far["sequence weight, truncated at 2"].spread < far["sequence weight, not truncated"].spread
    assert far["sequence weight, truncated at 2"].bias > far["sequence weight, not truncated"].bias


def test_clipping_around_a_stale_policy_stalls_where_clipping_around_the_proximal_one_does_not() -> None:
    naive = measure(BY_NAME["PPO clip around behaviour"], FAR, BEHAVIOUR, REWARD, 16)
    decoupled = measure(BY_NAME["token weight, truncated at 2"], FAR, BEHAVIOUR, REWARD, 16)
    assert decoupled.cosine > 0.8 > naive.cosine and decoupled.bias < 0.6 * naive.bias


def test_raising_small_ratios_biases_and_counts_more_than_was_sampled() -> None:
    """Why weights are cut above only: cut below they sum to more than 1, and what the policy left still pulls at it."""
    farther = policy.later(BEHAVIOUR, REWARD, 32)
    weights = policy.probabilities(BEHAVIOUR)
    inputs = policy.inputs_for(farther, BEHAVIOUR, REWARD - (weights * REWARD).sum(), 1)
    whole = (inputs.logp_proximal_N - inputs.logp_behaviour_N).reshape(policy.Y, policy.T).sum(1).exp()
    plain = policy.gradients(inputs, LossConfig(is_cap=None), farther)
    exact = policy.exact_gradient(farther, REWARD)
    bias, mass = {}, {}
    for low in (0.0, 0.5):
        raised = weights * whole.clamp(min=low)
        bias[low], mass[low] = float((raised[:, None] * plain).sum(0).sub(exact).norm() / exact.norm()), float(raised.sum())
    assert bias[0.0] < 1e-9 and mass[0.0] == pytest.approx(1.0)
    assert bias[0.5] > 0.1 and mass[0.5] > 1.05


def test_the_published_table_is_the_one_that_is_computed() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "learner.md"
    assert markdown() in document.read_text()
