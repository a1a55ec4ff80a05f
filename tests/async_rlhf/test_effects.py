"""Which settings change nothing: a remark for exactly those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loss_oracles import Completion

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.registry import loss_spec, losses
from async_rlhf.run.checks.effects import without_effect
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load
from tests.conftest import REPOSITORY
from tests.learner.test_losses import completions, value_and_gradient

CONFIGS = REPOSITORY / "configs"
# Of every setting that a formula may read another value than its default.
CHANGED: dict[str, Any] = {"clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.01, "is_cap": 1.01, "kl_estimator": "k1"}
BASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all corrections": {"sequence_mask": (0.4, 2.5), "divergence_max": 3.0, "kl_coef": 0.3, "reduction": "fixed"},
    "weights of completions": {"is_level": "sequence"},
}


def remarked(config: Config) -> set[str]:
    return {remark.partition(" changes nothing")[0] for remark in without_effect(config)}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", sorted(losses()))
def test_what_a_loss_does_not_read_is_remarked_and_nothing_else(kind: str, base: str, small: Any) -> None:
    of_tokens = loss_spec(kind).level == "token"  # others have one reduction
    own = {name: value for name, value in BASES[base].items() if of_tokens or name != "reduction"}
    run, before = small(), LossConfig(kind=kind, **own)
    batches = [completions(seed, spread=1.0) for seed in range(12)]
    for name, value in CHANGED.items():
        changed = before.model_copy(update={name: value})
        remarks = remarked(run.model_copy(update={"loss": changed}))
        assert differ(batches, before, changed) != (f"loss.{name}" in remarks), name
    for name, value in before.parameters.items():
        if name != "top_k":  # of these inputs the likeliest tokens are given
            half = tuple(each / 2 for each in value) if isinstance(value, tuple) else value / 2
            assert differ(batches, before, LossConfig(kind=kind, **own, **{name: half})), name


def differ(batches: list[list[Completion]], one: LossConfig, other: LossConfig) -> bool:
    pairs = [[value_and_gradient(batch, loss) for loss in (one, other)] for batch in batches]
    return any(first[0] != second[0] or not torch.equal(first[1], second[1]) for first, second in pairs)


UNUSED: dict[str, dict[str, Any]] = {
    "learner.zero_stage": {"learner.zero_stage": 3},
    "learner.lora.targets": {"learner.lora.targets": ["q_proj"]},
    "learner.critic.learning_rate": {"learner.critic.learning_rate": 1e-3},
    "learner.reference_dtype": {"learner.reference_dtype": "bfloat16"},
    "engine.kv.window": {"engine.kv.window": 8},
    "environment.workers": {"environment.workers": 2},
    "advantage.max_refills": {"advantage.max_refills": 4},
    "advantage.gamma": {"advantage.gamma": 0.9},
    "advantage.normalise": {"advantage.normalise": False},
    "advantage.scale_by_std": {"advantage.scale_by_std": False, "loss.kind": "online_dpo"},
    "advantage.kind": {"advantage.kind": "leave_one_out", "loss.kind": "online_dpo"},
}


@pytest.mark.parametrize("key", UNUSED)
def test_a_setting_of_what_the_run_has_not_got_is_remarked(key: str, small: Any) -> None:
    assert remarked(small(**UNUSED[key])) - remarked(small()) == {key}


@pytest.mark.parametrize(
    "settings",
    [
        {"learner.backend": "deepspeed", "learner.zero_stage": 3},
        {"learner.lora.rank": 2, "learner.lora.targets": ["q_proj"]},
        {"engine.kv": {"policy": "window", "window": 8}},
        {"advantage.kind": "reinforce_pp", "advantage.gamma": 0.9},
        {"advantage.constant_groups": "refill", "advantage.max_refills": 4},
    ],
    ids=str,
)
def test_what_a_run_has_is_not_remarked(settings: dict[str, Any], small: Any) -> None:
    assert not remarked(small(**settings)) - remarked(small())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_setting_of_a_shipped_configuration_has_an_effect(path: Path) -> None:
    is_fetched = path.stem in ("gsm8k", "chat", "chat_game")
    own = {"model": str(CONFIGS / "models" / "tiny-speller")} if is_fetched else {}
    assert not remarked(load(path, own))
