"""The preset of classic RLHF runs end to end at reduced length: the shipped reward model, a critic, a frozen reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from async_rlhf.actors.scoring.models import RewardModel
from async_rlhf.api import train
from async_rlhf.experiments.warm_start.speller import INSTRUCTION
from tests.conftest import QUICK, SMALL

PRESETS = QUICK.parent
JUDGE = PRESETS / "models" / "tiny-judge"


def test_the_shipped_reward_model_is_small_and_ranks_what_it_was_shown() -> None:
    assert (JUDGE / "model.safetensors").stat().st_size < 2_000_000
    prompt = INSTRUCTION + "lemon"
    right, nearly, copied, repeated = RewardModel(JUDGE).score([prompt] * 4, ["nomel", "nomle", "lemon", "lllll"], 128)
    assert right > copied > repeated and right > nearly
    quality = json.loads((JUDGE / "quality.json").read_text())
    assert quality["after"]["accuracy"] > 0.75 and quality["gold"] > 0.9


@pytest.mark.rest
def test_the_ppo_preset_learns_from_the_reward_model_with_critic_and_reference(tmp_path: Path) -> None:
    changed: dict[str, Any] = {**SMALL, "max_steps": 3, "learner.critic.warmup_steps": 1}
    result = train(PRESETS / "ppo_rlhf.toml", overrides={**changed, "output_dir": str(tmp_path / "runs")}, quiet=True)
    assert result.finished and [record["applied"] for record in result.metrics] == [True] * 3
    for record in result.metrics:
        assert record["staleness/max"] == 0 and record["rewards/failed_ratio"] == 0
        assert record["critic/loss"] > 0 and "kl/reference" in record
        # only the judge is rewarded, in running deviations of what was seen so far; the task itself is measured
        assert 0 <= record["rewards/reasoning_gym/mean"] <= 1 and record["rewards/reward_model/mean"] is not None
    assert abs(result.metrics[0]["reward"]) < 1e-6 and abs(result.metrics[0]["kl/reference"]) < 1e-5
    start, trained = (
        load_file(path / "model.safetensors")
        for path in (PRESETS / "models" / "tiny-speller", result.run_dir / "checkpoints" / "latest" / "model")
    )
    assert any(not start[name].equal(trained[name]) for name in start)
    assert (result.run_dir / "checkpoints" / "latest" / "critic.safetensors").exists()
