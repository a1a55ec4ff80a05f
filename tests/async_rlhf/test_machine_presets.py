"""The presets of the learner's machine run end to end, and a learner that loses a rank begins again where it was durable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, has_ended, wait_for

CONFIGS = QUICK.parent


def test_adapters_learn_and_actors_adopt_them(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    _, _, *overrides = small_arguments(**{"max_steps": 3, "checkpoint.save_every": 2})
    code, output = command("train", str(CONFIGS / "lora.toml"), *overrides).finish()
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "lora")
    metrics = run.read_metrics()
    assert [record["applied"] for record in metrics] == [True] * 3 and metrics[-1]["canary/drift"] < 1e-3
    start, trained = (load_file(path / "model.safetensors") for path in (CONFIGS / "models/tiny-speller", run.latest / "model"))
    moved = {name for name in start if not start[name].equal(trained[name])}
    assert moved and all("proj" in name for name in moved)
    assert (run.latest / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("form", ["sequence_parallel", "tensor_parallel"])
def test_ranks_that_share_rows_or_layers_train_and_actors_adopt_what_they_publish(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path, form: str
) -> None:
    _, _, *overrides = small_arguments(**{"max_steps": 3, "checkpoint.save_every": 2, f"learner.{form}": 2})
    code, output = command("train", str(CONFIGS / "zero3.toml"), *overrides).finish()
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "zero3")
    metrics = run.read_metrics()
    assert [record["applied"] for record in metrics] == [True] * 3 and metrics[-1]["canary/drift"] < 1e-3
    assert run.read_ledger()["ledger"]["closes"]
    start, trained = (load_file(path / "model.safetensors") for path in (CONFIGS / "models/tiny-speller", run.latest / "model"))
    assert {name: tensor.shape for name, tensor in trained.items()} == {name: tensor.shape for name, tensor in start.items()}
    assert not any(start[name].equal(trained[name]) for name in start)


def test_a_learner_that_loses_a_rank_says_which_and_goes_on_from_its_checkpoint(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """ZeRO-3 on two ranks: real processes, published weights verified by the actor, one rank killed on the way."""
    num_steps = 8
    _, _, *overrides = small_arguments(**{"max_steps": num_steps, "checkpoint.save_every": 2})
    started = command("train", str(CONFIGS / "zero3.toml"), *overrides)
    directory = tmp_path / "runs" / "zero3"
    wait_for(lambda: (directory / "checkpoints" / "latest").exists(), "a checkpoint")
    ranks = [each for each in started.child("learner").children() if "learner_rank" in each.cmdline()]
    assert len(ranks) == 1
    ranks[0].kill()
    code, output = started.finish()
    assert code == 0, output
    assert "rank 1" in output and "starting it again" in output, output
    run = RunDir(directory)
    metrics = run.read_metrics()
    assert [record["step"] for record in metrics] == list(range(1, num_steps + 1))
    assert all(record["applied"] for record in metrics) and metrics[-1]["canary/drift"] < 1e-3
    assert run.read_ledger()["ledger"]["closes"]
    assert has_ended(ranks[0])
