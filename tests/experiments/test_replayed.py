"""Corrections that learn from recorded batches: a real recording replayed under two of them, the report, what is refused."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rlhf.api import run
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.counterfactual.recorded import check_seeds
from async_rlhf.experiments.staleness.replayed import Arm, app, recorded, report
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

CORRECTIONS = """
[other]
kind = "ppo_clip"
is_cap = 2.0

[same]
kind = "decoupled_ppo"
allow_uncorrected = true
"""


@pytest.mark.rest
def test_a_recorded_run_is_replayed_under_each_correction_and_under_its_own_gives_its_own_weights(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    changed = {"queue.exact": True, "queue.max_staleness": 2, "queue.keep_rollouts": True, "loss.allow_uncorrected": True}
    source = Path(run(small(max_steps=4, **changed), quiet=True).run_dir)
    (tmp_path / "two.toml").write_text(CORRECTIONS)
    arguments = [str(source), "--corrections", str(tmp_path / "two.toml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output

    def weights(path: Path) -> bytes:
        (found,) = (path / "checkpoints" / "latest" / "model").glob("*.safetensors")
        return found.read_bytes()

    same, other = (source.with_name(f"{source.name}-{name}") for name in ("same", "other"))
    assert weights(same) == weights(source) != weights(other)
    rows = [*csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines())]
    assert [row["correction"] for row in rows] == ["other", "same"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "fewer than 3" in text and "minus same" in text

    metrics = RunDir(other).metrics
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    cut = CliRunner().invoke(app, arguments)
    assert cut.exit_code == 3 and "was cut short after step 3; remove it" in cut.output


def arms(name: str, rewards: list[float]) -> list[Arm]:
    return [Arm(name, seed, reward, 6.0, 0.01, 0.9) for seed, reward in enumerate(rewards)]


def test_the_report_compares_within_a_seed_and_corrects_for_the_number_of_comparisons() -> None:
    base = [0.1, 0.5, 0.9, 0.3, 0.7]
    better = [value + 0.1 + 0.001 * i for i, value in enumerate(base)]
    text = report([*arms("first", base), *arms("better", better), *arms("equal", base[::-1])], "first")
    better_row = next(line for line in text.splitlines() if line.startswith("| better"))
    assert "+0.102 (+0.1" in better_row and "< 0.001" in better_row
    assert next(line for line in text.splitlines() if line.startswith("| first")).count("|  |") == 1
    assert "5 recorded runs" in text and "fewer than" not in text


def test_what_cannot_be_replayed_is_refused_before_any_work(small: Callable[..., Config]) -> None:
    forgetful = RunDir.create(small(name="forgetful"))
    with pytest.raises(ConfigError, match="is still being trained"):
        recorded(forgetful.path)
    forgetful.retire()
    with pytest.raises(ConfigError, match=r"queue\.keep_rollouts = true"):
        recorded(forgetful.path)
    with pytest.raises(ConfigError, match="the seeds 0, 0; one run a seed"):
        check_seeds([small(name="a"), small(name="b")])
    with pytest.raises(ConfigError, match=r"'b' differs from 'a' in more than its seed: learner\.learning_rate: "):
        check_seeds([small(name="a"), small(name="b", seed=1, **{"learner.learning_rate": 1e-3})])
    check_seeds([small(name="a"), small(name="b", seed=1)])
