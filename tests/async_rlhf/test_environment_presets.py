"""The shipped environments: a model learns to call a tool because the tool helps, and a game is scored as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.run.config import load
from async_rlhf.run.preflight import preflight
from async_rlhf.run.run_dir import RunDir

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("name", ["tools", "game"])
def test_a_shipped_configuration_passes_the_check_before_a_run(name: str) -> None:
    assert preflight(load(CONFIGS / f"{name}.toml")).num_prompts > 0


def test_the_model_learns_to_call_the_calculator(command: Callable[..., Any], tmp_path: Path) -> None:
    """From no held-out product to nearly all, in 60 steps; it cannot multiply."""
    code, output = command("train", str(CONFIGS / "tools.toml"), "--set", f"output_dir={tmp_path}").finish()
    assert code == 0, output
    assert "held-out accuracy at the start: 0.0" in output
    (line,) = [line for line in output.splitlines() if line.startswith("held-out accuracy at the end")]
    assert float(line.split(": ")[1].split(",")[0]) >= 0.8, output
    records = RunDir(tmp_path / "tools").read_metrics()
    assert records[-1]["episodes/mean_turns"] > 1.6 > 1.4 > records[0]["episodes/mean_turns"]
