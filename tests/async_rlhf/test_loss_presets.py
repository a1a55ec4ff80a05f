"""The presets about losses run end to end at reduced length, over real processes, and do what they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import TrainResult, train
from tests.conftest import QUICK, SMALL

PRESETS = QUICK.parent


def shortened(name: str, tmp_path: Path, **overrides: Any) -> TrainResult:
    changed = {**SMALL, "output_dir": str(tmp_path / "runs"), **overrides}
    return train(PRESETS / name, overrides=changed, quiet=True)


def test_the_decoupled_preset_trains_on_old_truncated_data_under_its_masks_and_its_guard(tmp_path: Path) -> None:
    result = shortened("decoupled.toml", tmp_path, **{"learner.updates_per_step": 2, "generation.top_p": 0.9})
    assert result.finished and len(result.metrics) == 4
    # the first batch is the learner's own, and its ratios are to what was sampled from
    assert result.metrics[0]["mismatch/abs_log_ratio"] < 1e-4 and result.metrics[0]["is/ess"] > 0.999
    for record in result.metrics:
        assert record["applied"] or record["groups/zero_advantage"] == 4
        assert record["staleness/violations"] == 0
        assert 0 <= record["staleness/target"] <= 8 and record["staleness/max"] <= 8
        assert 0 <= record["is/masked_ratio"] <= 1 and record["is/weight_mean"] <= 2.0
        assert set(record["drift/by_staleness"]) <= set(record["staleness/histogram"])


@pytest.mark.rest
def test_the_online_dpo_preset_learns_from_one_pair_a_group(tmp_path: Path) -> None:
    result = shortened("online_dpo.toml", tmp_path, sampled_groups=4)
    assert result.finished and len(result.metrics) == 4
    groups = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    for record in [record for record in result.metrics if record["applied"]]:
        assert 0 <= record["dpo/accuracy"] <= 1 and "kl/reference" in record
        chosen = [[r for r in g["rollouts"] if r["advantage"] is not None] for g in groups if g["step"] == record["step"]]
        assert sorted(map(len, chosen)) == [0] * record["groups/zero_advantage"] + [2] * (4 - record["groups/zero_advantage"])
        trained = sum(point["tokens"] for point in record["drift/by_staleness"].values())
        assert trained == sum(len(rollout["tokens"]) for pair in chosen for rollout in pair)
    assert abs(result.metrics[0]["kl/reference"]) < 1e-5  # the policy is still the initial model
