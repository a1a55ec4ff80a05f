"""Rollouts are read back from the journal, and a learner alone learns the same from them, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.api import run
from async_rlhf.cli.commands import app


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_a_kept_journal_is_shown_and_learned_from_again(small: Any) -> None:
    config = small(**{"queue.keep_rollouts": True, "queue.segment_bytes": 4096, "queue.max_staleness": 1})
    result = run(config, quiet=True)
    assert result.checkpoint is not None

    code, output = invoke("rollouts", "show", str(result.run_dir), "--json")
    exported = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and len(exported) == 16 and not any(record["sampled"] for record in exported)
    assert [[r["group"] for r in exported if r["step"] == record["step"]] for record in result.metrics] == [
        record["groups"] for record in result.metrics
    ]
    assert sum(len(rollout["completion_ids"]) for group in exported for rollout in group["rollouts"]) == sum(
        record["num_tokens"] for record in result.metrics
    )

    code, output = invoke("rollouts", "show", str(result.run_dir), "--group", "5")
    assert code == 0 and "group 5" in output and "reasoning_gym" in output, output

    quarantined = {"group": 5, "prompt": 5, "attempts": 1, "reasons": ["taken back by an operator"]}
    (result.run_dir / "quarantine.jsonl").write_text(json.dumps(quarantined) + "\n")
    code, output = invoke("rollouts", "show", str(result.run_dir))
    assert output.count("prompt:") == 4 and "12 more groups: --limit 16 shows all" in output, output
    code, output = invoke("rollouts", "show", str(result.run_dir), "--limit", "16")
    assert output.count("QUARANTINED: taken back by an operator") == 1 and "more groups" not in output, output

    code, output = invoke("rollouts", "replay", str(result.run_dir), "--name", "again")
    assert code == 0 and "4 steps learned again" in output, output
    again = result.run_dir.parent / "again"
    first = (result.checkpoint / "model.safetensors").read_bytes()
    assert (again / "checkpoints" / "latest" / "model" / "model.safetensors").read_bytes() == first

    sets = ["--set", "advantage.scale_by_std=false", "--set", "learner.ranks=2"]
    code, output = invoke("rollouts", "replay", str(result.run_dir), "--name", "other", *sets)
    assert code == 0, output
    other = result.run_dir.parent / "other" / "checkpoints" / "latest" / "model" / "model.safetensors"
    assert other.read_bytes() != first


@pytest.mark.rest
def test_a_journal_that_was_not_kept_says_so(small: Any) -> None:
    result = run(small(**{"queue.segment_bytes": 4096, "checkpoint.save_every": 1}), quiet=True)
    code, output = invoke("rollouts", "replay", str(result.run_dir), "--name", "again")
    assert code == 3 and "queue.keep_rollouts = true" in output, output
    assert not (result.run_dir.parent / "again").exists()
