"""How the policy is computed changes memory and rounding, and nothing else; a critic learns returns beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import make_group, make_model
from torch import Tensor

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.batch.rows import Row, make_rows, split_updates
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.policy import Policy
from async_rlhf.learner.objective.estimation import TokenTargets
from async_rlhf.learner.step import controller
from async_rlhf.learner.step.controller import Controller

GROUPS = [make_group(n, [3, 1, 6], version=0) for n in range(4)]
ROWS = make_rows(GROUPS, [[1.0, -1.5, 0.5]] * 4, 512)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_backend(path: Path, **settings: Any) -> Controller:
    return controller.make_backend(
        path, LearnerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e6, **settings}), LossConfig()
    )


def gradient(backend: Controller) -> dict[str, Tensor]:
    assert backend.step([ROWS], 0).applied
    return {name: p.grad.clone() for name, p in backend.machine.policy.model.named_parameters() if p.grad is not None}


def test_layers_that_compute_their_activations_again_give_the_same_gradient(model_dir: Path) -> None:
    plain, again = (gradient(make_backend(model_dir, gradient_checkpointing=on)) for on in (False, True))
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_checkpointed_layers_run_their_forward_pass_twice(model_dir: Path) -> None:
    backend = make_backend(model_dir, gradient_checkpointing=True)
    calls: list[int] = []
    model: Any = backend.machine.policy.model
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    backend.step([ROWS], 0)
    assert len(calls) == 2


def test_a_model_without_such_layers_is_refused() -> None:
    class Plain(torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match="this model has no layers that support it; use false"):
        Policy(Plain(), LearnerConfig(gradient_checkpointing=True))


def test_products_in_half_precision_leave_weights_gradient_and_optimizer_in_float32(model_dir: Path) -> None:
    half, whole = make_backend(model_dir, dtype="bfloat16"), make_backend(model_dir)
    ours, exact = gradient(half), gradient(whole)
    for name, grad in ours.items():
        assert grad.dtype == torch.float32
        assert float((grad - exact[name]).norm()) < 0.1 * float(exact[name].norm()) + 1e-3
    assert any(not torch.equal(ours[name], exact[name]) for name in ours)
    state = [value for each in half.machine._optimizer.state.values() for value in each.values()]
    assert state and all(value.dtype == torch.float32 for value in [*state, *half.machine.policy.model.parameters()])


def test_logits_in_small_chunks_give_the_gradient_of_large_ones(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = gradient(make_backend(model_dir))
    monkeypatch.setattr("async_rlhf.learner.model.policy.chunk_tokens", lambda vocabulary, mib: 3)
    small = gradient(make_backend(model_dir))
    for name, grad in large.items():
        torch.testing.assert_close(small[name], grad, rtol=1e-4, atol=1e-6)


class Capped(torch.nn.Module):
    """An output layer that is not linear, as that of models that cap their logits."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.inner(hidden)
        return 5 * torch.tanh(logits / 5)


def test_a_model_that_does_more_to_its_logits_keeps_its_own_output_layer(model_dir: Path) -> None:
    model: Any = make_model("llama")
    model.lm_head = Capped(model.lm_head)
    policy = Policy(model, LearnerConfig())
    batch = make_backend(model_dir).partition([ROWS])[0][0].batches[0]
    with torch.no_grad():
        logp_N, entropy_N, _ = policy(batch)
        first = policy.probe(torch.cat([batch.ids_RL[0, :5], batch.target_N[:1]]))[-1]
    assert float(logp_N[0]) == pytest.approx(float(first), abs=1e-4) and bool((entropy_N > 0).all())


def with_returns(backend: Controller, value: float) -> list[Row]:
    """The rows with what the critic sees of them now, and a return for every token to fit."""
    seen = backend.evaluate(ROWS)

    def targets(index: int) -> TokenTargets:
        returns = np.full_like(seen[index].logp_proximal, value)
        return TokenTargets(seen[index], advantage=returns, returns=returns)

    return [replace(row, members=tuple(replace(m, targets=targets(m.index)) for m in row.members)) for row in ROWS]


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_learns_the_returns_and_only_it_does_while_it_warms_up(model_dir: Path, kind: str) -> None:
    critic = {"kind": kind, "learning_rate": 3e-2, "warmup_steps": 40}
    backend = make_backend(model_dir, critic=critic)
    before = {name: bytes(tensor.data) for name, tensor in backend.tensors().items()}
    first = backend.evaluate(ROWS)[0].value
    assert first is not None and not first.any()
    losses = []
    for step in range(40):
        losses.append(backend.step([with_returns(backend, 2.0)], step).metrics["critic/loss"])
    assert losses[0] == pytest.approx(2.0) and losses[-1] < 0.2
    values = backend.evaluate(ROWS)[0].value
    assert values is not None and abs(float(values.mean()) - 2.0) < 0.7
    if kind == "model":  # a head shares the policy's trunk, which the value loss moves
        assert {name: bytes(tensor.data) for name, tensor in backend.tensors().items()} == before


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_is_saved_and_goes_on_bit_for_bit(model_dir: Path, tmp_path: Path, kind: str) -> None:
    straight, resumed = (make_backend(model_dir, critic={"kind": kind}) for _ in range(2))
    rows = with_returns(straight, 1.0)
    straight.step([rows], 0)
    (tmp_path / "saved").mkdir()
    straight.save(tmp_path / "saved")
    straight.step([rows], 1)
    resumed.load(tmp_path / "saved")
    resumed.step([rows], 1)
    ours, theirs = (dict(each.machine.policy.named_parameters()) for each in (resumed, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and any("critic" in name for name in theirs)


def test_a_second_pass_over_the_rows_is_around_the_policy_before_the_first(model_dir: Path) -> None:
    backend = make_backend(model_dir, learning_rate=1e-2)
    updates = split_updates(ROWS, 2)
    twice = backend.step(updates * 2, 0)
    once = make_backend(model_dir, learning_rate=1e-2).step(updates, 0)
    for name in ("is/ratio_max", "kl/behaviour"):  # of the same policy before the first update, each token counted twice
        assert twice.metrics[name] == pytest.approx(once.metrics[name], rel=1e-5)
    assert twice.metrics["clip_ratio/region_mean"] > once.metrics["clip_ratio/region_mean"]
