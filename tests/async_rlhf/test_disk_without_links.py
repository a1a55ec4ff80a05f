"""On a disk without links and modes (exFAT, a cloud drive) a run is made, goes on, and its newest and best are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_rlhf.run.loading import load
from tests.conftest import QUICK, Start, Train, output_of

REFUSING = """
import errno, os

def refused(*arguments, **named):
    raise OSError(errno.EPERM, "Operation not permitted")

os.symlink = os.link = os.chmod = refused
"""


@pytest.fixture
def no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that are started from now on."""
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("no_links")
def test_a_run_is_made_goes_on_and_is_evaluated_and_pushed_by_names_of_its_checkpoints(command: Start, training: Train) -> None:
    more = {"max_steps": 4, "checkpoint.save_every": 2, "checkpoint.keep_last": 1, "evaluation.every": 2}
    started = training(**more)
    run, checkpoints = started.run, started.run.path / "checkpoints"
    output = started.ends_with(0, f"model: {checkpoints / 'step_000004' / 'model'}")
    assert output.count("checkpoints/best is no link here") == 1
    assert run.log("learner").read_text().count("checkpoints/latest is no link here") == 1
    command("train", str(run.path / "config.toml"), "--resume", "--set", "max_steps=6").ends_with(0)
    assert run.read_metrics()[-1]["step"] == 6
    assert {path.name for path in checkpoints.iterdir()} <= {"step_000002", "step_000004", "step_000006"}
    assert run.latest == checkpoints / "step_000006" and {line["checkpoint/failed"] for line in run.read_metrics()} == {0}
    records = [line for line in run.read_evaluations() if line["step"] > 0 and "mean_reward" in line]
    best = max(records, key=lambda line: (line["mean_reward"], -line["step"]))["step"]
    chosen = load(QUICK, {"model": str(checkpoints / "best" / "model")}).model
    assert chosen == str(checkpoints / f"step_{best:06d}" / "model")
    assert "Trained for 6 steps" in output_of(0, "push", checkpoints / "latest", "me/speller", "--dry-run")
