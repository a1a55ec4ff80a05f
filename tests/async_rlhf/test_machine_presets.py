"""The presets of the learner's machine run end to end, and a learner that loses a rank begins again where it was durable."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, has_ended, wait_for

CONFIGS = QUICK.parent


@pytest.mark.rest
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


@pytest.mark.rest
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


@pytest.mark.rest
def test_a_learner_that_loses_a_rank_says_which_and_goes_on_from_its_checkpoint(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """ZeRO-3 on two ranks: real processes, published weights verified by the actor. A rank is aborted, as nccl does it, where
    it waits for the other, which stands still and ends with it. The run then goes on for two steps with one rank and plain
    torch."""
    num_steps = 60
    _, _, *overrides = small_arguments(**{"max_steps": num_steps, "checkpoint.save_every": 2})
    started = command("train", str(CONFIGS / "zero3.toml"), *overrides)
    directory = tmp_path / "runs" / "zero3"
    wait_for(lambda: (directory / "checkpoints" / "latest").exists(), "a checkpoint")
    learner = started.child("learner")
    rank = started.child("learner_rank")
    learner.suspend()
    wait_for(lambda: rank.status() == psutil.STATUS_SLEEPING, "a rank that waits")
    rank.send_signal(signal.SIGABRT)
    code, output = started.finish()
    assert code == 0, output
    assert output.count("starting it again") == 1 and "rank 1 ended by signal 6 (SIGABRT)" in output, output
    assert has_ended(rank) and has_ended(learner)
    more = {"max_steps": num_steps + 2, "learner.ranks": 1, "learner.backend": "torch"}
    sets = [word for key, value in more.items() for word in ("--set", f"{key}={value}")]
    code, output = command("train", str(CONFIGS / "zero3.toml"), *overrides, *sets, "--resume").finish()
    assert code == 0, output
    run = RunDir(directory)
    metrics = run.read_metrics()
    assert [record["step"] for record in metrics] == list(range(1, num_steps + 3))
    assert all(record["applied"] for record in metrics) and metrics[-1]["canary/drift"] < 1e-3
    assert run.read_ledger()["ledger"]["closes"]
