"""What groups of one with a critic are trained by: two lambdas, a band around the policy that sampled, and a critic that learns
more often than the policy, with the attention of its trunk frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from making import ROWS, make_backend, weights, with_returns

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.model.policy import _freeze_attention
from async_rlhf.learner.objective import enumerable
from async_rlhf.learner.objective.estimation import token_estimates
from async_rlhf.learner.objective.objective import objective

RANDOM = np.random.default_rng(0)
LENGTHS = (1, 3, 12, 40)
REWARDS, VALUES, LOG_RATIOS = ([RANDOM.normal(size=n).astype(np.float32) for n in LENGTHS] for _ in range(3))


@pytest.mark.parametrize("kind", ["gae", "traced"])
def test_a_longer_completion_has_longer_traces_and_the_critic_its_own(kind: str) -> None:
    config = AdvantageConfig(kind=kind, gamma=0.99, lam_alpha=0.2, lam_critic=1.0, normalise=False, **({} if kind == "gae" else {"c_cap": 0.9}))
    found = token_estimates(REWARDS, config, VALUES, LOG_RATIOS)
    for one, rewards, values, logs in zip(found, REWARDS, VALUES, LOG_RATIOS, strict=True):
        lam = max(0.0, 1 - 1 / (0.2 * len(rewards)))
        if kind == "gae":
            twin, own = (oracles.gae(rewards.tolist(), values.tolist(), 0.99, each) for each in (lam, 1.0))
            assert one.returns == pytest.approx(np.array(own) + values, abs=1e-4), "all that came, discounted"
        else:
            twin = oracles.traced(rewards.tolist(), values.tolist(), np.exp(logs).tolist(), 0.99, lam, 0.9)
        assert one.advantage == pytest.approx(twin, abs=1e-4)


def test_each_lambda_leaves_the_other_estimate_as_it_was() -> None:
    plain, adaptive, fitted = (
        token_estimates(REWARDS, AdvantageConfig(kind="gae", **own), VALUES, LOG_RATIOS)
        for own in ({}, {"lam_alpha": 0.5}, {"lam_critic": 0.5})
    )
    for one, other, last in zip(plain, adaptive, fitted, strict=True):
        assert np.array_equal(one.returns, other.returns) and np.array_equal(one.advantage, last.advantage)  # type: ignore[arg-type]
    assert not np.allclose(plain[-1].advantage, adaptive[-1].advantage)  # type: ignore[arg-type]
    assert not np.allclose(plain[-1].returns, fitted[-1].returns)  # type: ignore[arg-type]


def test_a_token_counts_by_its_ratio_within_the_band_and_not_at_all_outside() -> None:
    ratios = torch.tensor([1.0, 0.25, 0.2, 0.19, 3.9, 4.0, 4.1], dtype=torch.float64)
    for sign in (1.0, -1.0):
        each = torch.arange(len(ratios))
        now = ratios.log().requires_grad_()
        inputs = enumerable.LossInputs(
            now, now.detach(), torch.zeros_like(ratios), torch.full_like(ratios, sign), each, each, each
        )
        out = objective(inputs, LossConfig(kind="sao"))
        out.total.backward()  # type: ignore[no-untyped-call]
        assert now.grad is not None
        assert (-sign * now.grad).tolist() == pytest.approx([1.0, 0.25, 0.2, 0.0, 3.9, 4.0, 0.0])
        assert float(out.sums["clip_ratio/region_mean"]) == 2.0


def trained(model_dir: Path, steps: int = 1, **critic: Any) -> tuple[dict[str, bytes], dict[str, torch.Tensor], float]:
    """Weights of the policy, those of the critic, and how far its values are from what they are fitted to."""
    backend = make_backend(model_dir, critic={"kind": "model", "learning_rate": 3e-3, **critic})
    for step in range(steps):
        backend.step([with_returns(backend, 2.0)], step)
    values = np.concatenate([seen.value for seen in backend.evaluate(ROWS).values()])  # type: ignore[misc]
    own = backend.machine.policy.critic
    assert own is not None
    return weights(backend), own.state_dict(), float(np.abs(values - 2.0).mean())


def test_a_critic_may_learn_more_often_than_the_policy_which_it_leaves_alone(model_dir: Path) -> None:
    once, thrice = trained(model_dir), trained(model_dir, updates=3)
    assert thrice[0] == once[0], "bit for bit"
    assert thrice[2] < once[2] < 2.0
    own = make_backend(model_dir, critic={"kind": "model", "updates": 2})
    own.dry_run([with_returns(own, 2.0)], 0)
    assert weights(own) == weights(make_backend(model_dir))


def test_an_update_of_the_critic_moves_no_policy_that_has_a_gradient_of_zero(model_dir: Path) -> None:
    """As each of several ranks has it, where AdamW's running means would go on moving it."""
    backend = make_backend(model_dir, critic={"kind": "model"})
    backend.step([with_returns(backend, 2.0)], 0)
    before, machine = weights(backend), backend.machine
    for p in machine.policy.parameters():
        p.grad = torch.zeros_like(p)
    machine.keep_critic()
    assert machine.apply(1, finite=True)[1] and weights(backend) == before


def test_the_attention_of_its_trunk_may_stay_and_the_rest_learns(model_dir: Path) -> None:
    _, before, _ = trained(model_dir, steps=0)
    _, after, distance = trained(model_dir, steps=3, freeze_attention=True, updates=2)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name for name in after if name not in moved} == {name for name in after if ".self_attn." in name}
    assert {"value.weight", "trunk.layers.0.mlp.up_proj.weight"} <= moved and distance < 2.0
    with pytest.raises(ConfigError, match="which layers of this model attend is not known"):
        _freeze_attention(torch.nn.Linear(2, 2))
