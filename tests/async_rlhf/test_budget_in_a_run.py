"""A real run that ends by its budget: in its own eyes, in the hub's, in those of who looks and of who resumes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.inspect.chaos import problems
from async_rlhf.inspect.status import lines, read
from async_rlhf.preparation import prepare
from async_rlhf.run.run_dir import RunDir

SETTINGS = {"max_steps": 500, "queue.max_staleness": 2, "evaluation.at_end": True, "queue.keep_rollouts": True}


@pytest.mark.rest
def test_a_run_ends_by_its_tokens_and_goes_on_with_more_of_them(small: Callable[..., Any], tmp_path: Path) -> None:
    config = small(**SETTINGS, max_trained_tokens=150)
    result = train(config, quiet=True)
    run, used = RunDir(result.run_dir), [record["num_tokens_total"] for record in result.metrics]
    assert result.finished and used[-2] < 150 <= used[-1]
    assert (result.checkpoint or Path()).resolve().parent.name == f"step_{len(used):06d}"
    assert [(record["label"], record["step"]) for record in result.evaluations] == [("end", len(used))]
    assert problems(run, config) == [], "every step once, and the ledger closes"
    ledger = run.read_ledger()["ledger"]
    assert ledger["leased"] == ledger["in_flight"] == ledger["quarantined"] == 0 and ledger["tokens_trained"] == used[-1]
    assert [run.read_ledger()["state"], run.end() and run.end().reason] == ["finished", "max_trained_tokens = 150 reached"]
    told = lines(run, read(run))
    assert told[0].endswith(f"finished, step {len(used)} of 500, {used[-1]} of 150 tokens")
    assert told[1] == "ended: max_trained_tokens = 150 reached"

    assert train(config, resume=True, quiet=True).metrics == result.metrics, "nothing is left"
    larger = small(**SETTINGS | {"evaluation.at_end": False}, max_trained_tokens=used[-1] + 1)
    more = train(larger, resume=True, quiet=True)
    assert more.finished and more.metrics[:-1] == result.metrics and problems(run, larger) == []
    with pytest.raises(ConfigError, match=rf"max_trained_tokens = 150 reached before step {len(used) + 1}, .*--from-step"):
        prepare(config, resume=True)

    again = CliRunner().invoke(app, ["rollouts", "replay", str(run.path), "--name", "again"])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "runs/again/checkpoints/latest/model/model.safetensors").read_bytes() == (
        run.latest / "model/model.safetensors"
    ).read_bytes()


def test_what_a_killed_supervisor_left_is_finished_by_what_was_recorded(small: Callable[..., Any]) -> None:
    run = RunDir.create(small(**SETTINGS, max_seconds=9))
    run.retire()
    steps = [{"step": step, "num_tokens_total": 9 * step, "step_time_total": 4.5 * step} for step in (1, 2)]
    for recorded, head in ((steps[:1], "stopped, step 1 of 500, 4 of 9 seconds"), (steps, "finished, step 2 of 500, 9 of 9")):
        run.metrics.write_text("".join(json.dumps(step) + "\n" for step in recorded))
        assert head in lines(run, read(run))[0]
    assert read(run)["used_up"] == "max_seconds = 9 reached"
