"""A run whose environment is an agent: the calculator over HTTP is the calculator as a generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY

pytest.importorskip("openai")

CONFIGS = REPOSITORY / "configs"

LEARNED = ("reward", "loss", "grad_norm", "completions/mean_length", "episodes/mean_turns", "staleness/max", "entropy")


def test_the_shipped_agent_passes_the_check_before_a_run() -> None:
    assert preflight(load(CONFIGS / "agent.toml")).num_prompts > 0


@pytest.mark.rest
def test_an_agent_over_http_is_trained_as_the_generator_that_does_the_same(command: Callable[..., Any], tmp_path: Path) -> None:
    """Without staleness bit for bit: the same tokens are read, sampled and trained on."""
    settings = {"output_dir": tmp_path, "max_steps": 3, "queue.max_staleness": 0, "data.held_out": 8}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    records = {}
    for name in ("tools", "agent"):
        code, output = command("train", str(CONFIGS / f"{name}.toml"), *sets).finish()
        assert code == 0, output
        records[name] = RunDir(tmp_path / name).read_metrics()
    for one, other in zip(records["tools"], records["agent"], strict=True):
        assert {key: one[key] for key in LEARNED if key in one} == {key: other[key] for key in LEARNED if key in other}
        assert one["reported/calculator/calls"] == other["reported/solve/products"]
        assert other["reported/solve/conversations"] == 1 and other["reported/solve/retries_joined"] == 0
        assert other["reported/solve/calls"] == other["episodes/mean_turns"]


@pytest.mark.rest
@pytest.mark.parametrize("engine", ["vllm"])
def test_an_agent_drives_another_engine(command: Callable[..., Any], tmp_path: Path, engine: str) -> None:
    pytest.importorskip(engine)
    settings = {"output_dir": tmp_path, "max_steps": 3, "engine.kind": engine, "evaluation.at_start": False}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value, default=str)}")]
    code, output = command("train", str(CONFIGS / "agent.toml"), *sets, "--set", "evaluation.at_end=false").finish()
    assert code == 0, output
    first, *others = RunDir(tmp_path / "agent").read_metrics()
    assert first["mismatch/abs_log_ratio"] < 1e-4
    for record in (first, *others):
        assert record["rewards/failed_ratio"] == record["staleness/violations"] == 0
        assert record["reported/solve/calls"] == record["episodes/mean_turns"]
