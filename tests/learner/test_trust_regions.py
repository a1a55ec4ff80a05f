"""Losses that bound how far a policy may move from the one that sampled: where they stop, and that they train."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from making import ADVANTAGES, GROUPS, ROWS, make_backend
from pydantic import ValidationError

from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.corrections import binary_kl
from async_rlhf.learner.objective.objective import LossInputs, objective
from async_rlhf.learner.registry import load_function, loss_spec, losses


def of_tokens(rows: list[tuple[float, float, float]]) -> LossInputs:
    """One completion each: probability now, when sampled, advantage."""
    now, sampled, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    each = torch.arange(len(rows))
    return LossInputs(now.log().requires_grad_(), now.log(), sampled.log(), advantage, each, each, each)


def pulls(kind: str, rows: list[tuple[float, float, float]]) -> list[float]:
    """What each token's log-probability gains, over its advantage."""
    inputs = of_tokens(rows)
    objective(inputs, LossConfig(kind=kind, is_cap=10.0)).total.backward()  # type: ignore[no-untyped-call]
    assert inputs.logp_current_N.grad is not None
    return (-inputs.logp_current_N.grad / inputs.advantage_N).tolist()


@pytest.mark.parametrize(("kind", "two_sided"), [("dppo_tv", False), ("dppo_kl", False), ("ipo", True)])
def test_an_unlikely_token_may_move_by_a_ratio_that_a_likely_one_may_not(kind: str, two_sided: bool) -> None:
    likely, back, fallen, regained = (0.95, 0.55, 1.0), (0.95, 0.55, -1.0), (0.1, 0.6, -1.0), (0.1, 0.6, 1.0)
    unlikely, near = (0.004, 0.001, 1.0), (0.56, 0.55, 1.0)
    drawn_back = [0.0, 0.0] if two_sided else [0.95 / 0.55, 0.1 / 0.6]
    expected = [0.0, drawn_back[0], 0.0, drawn_back[1], 4.0, 0.56 / 0.55]
    assert pulls(kind, [likely, back, fallen, regained, unlikely, near]) == pytest.approx(expected)


def test_a_soft_weight_is_1_on_the_policys_own_data_and_vanishes_on_both_sides() -> None:
    ratios = (1.0, 2 / 3, 1.5, 0.01, 20.0)
    rows = [(0.04 * r, 0.04, sign) for sign in (1.0, -1.0) for r in ratios]
    weights = pulls("vespo", rows)
    assert weights[0] == weights[5] == 1.0 and max(weights[:5]) == weights[1] and max(weights[5:]) == weights[7]
    assert max(*weights[3:5], *weights[8:]) < 3e-3


def test_what_oapl_is_least_at_is_the_best_policy_near_the_one_that_sampled_however_far_the_learner_is() -> None:
    beta, reward, behaviour = 0.7, enumerable.rewards(), enumerable.initial()
    p = enumerable.probabilities(behaviour)
    value = beta * (p * (reward / beta).exp()).sum().log()
    logits = enumerable.later(behaviour, reward, 16).requires_grad_()
    config = LossConfig(kind="oapl", beta=beta)
    inputs = enumerable.inputs_for(behaviour, behaviour, reward - value, 16)
    descent = torch.optim.LBFGS([logits], max_iter=400, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

    def expected() -> torch.Tensor:
        descent.zero_grad()
        now = replace(inputs, logp_current_N=enumerable.logprobs(logits).flatten())
        terms, _ = load_function("loss", "oapl")(now, torch.ones_like(now.advantage_N), **config.arguments)
        loss: torch.Tensor = (p * terms).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    descent.step(expected)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(enumerable.probabilities(logits), p * ((reward - value) / beta).exp(), rtol=1e-5, atol=1e-8)


def test_two_events_diverge_as_bernoullis_do_at_any_probability() -> None:
    p, q = torch.rand(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.kl_divergence(torch.distributions.Bernoulli(p), torch.distributions.Bernoulli(q))
    torch.testing.assert_close(binary_kl(p.log(), q.log()), expected)
    sure, likely = torch.tensor([0.0]), torch.tensor([-0.1])
    assert binary_kl(sure, sure).tolist() == [0.0] and binary_kl(likely, sure).tolist() == [math.inf]
    assert binary_kl(likely, torch.tensor([1e-7])).tolist() == [math.inf], "above 1 by rounding"


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("dppo_tv", "delta", 0.0), ("dppo_tv", "delta", 1.0), ("dppo_kl", "delta", -1.0), ("ipo", "epsilon", 1.0),
        ("oapl", "beta", 0.0), ("sapo", "tau", [1.0, 0.0]), ("vespo", "k", [0.0, 3.0]), ("vespo", "lam", [3.0]),
        ("sao", "low", 1.5), ("sao", "high", 1.0),
    ],
)  # fmt: skip
def test_a_region_that_holds_all_or_nothing_is_refused_by_name(kind: str, setting: str, value: object) -> None:
    with pytest.raises(ValidationError, match=setting):
        LossConfig.model_validate({"kind": kind, setting: value})


@pytest.mark.rest
@pytest.mark.parametrize("kind", [kind for kind in losses() if loss_spec(kind).learns_from == "all"])
def test_twenty_steps_on_what_the_first_version_sampled_prefer_what_was_good(kind: str, model_dir: Path) -> None:
    backend = make_backend(model_dir, LossConfig(kind=kind), learning_rate=3e-3)
    sampled = backend.evaluate(ROWS)
    own = [
        replace(
            group, rollouts=tuple(replace(r, logprobs=sampled[3 * g + m].logp_proximal) for m, r in enumerate(group.rollouts))
        )
        for g, group in enumerate(GROUPS)
    ]
    rows = make_rows(own, ADVANTAGES)
    reports = [backend.step([rows], step) for step in range(20)]
    assert all(report.applied and math.isfinite(report.metrics["loss"]) for report in reports)

    def preference(found: dict[int, object]) -> float:
        worth = [value for group in ADVANTAGES for value in group]
        return sum(value * float(found[index].logp_proximal.mean()) for index, value in enumerate(worth))  # type: ignore[attr-defined]

    assert preference(backend.evaluate(rows)) > preference(sampled) + 0.5  # type: ignore[arg-type]
