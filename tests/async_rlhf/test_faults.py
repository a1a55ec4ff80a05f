"""Anything may be killed: the run goes on, nothing is lost, nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.run.run_dir import RunDir
from tests.conftest import wait_for


def steps(run: Path) -> int:
    """Steps recorded so far."""
    return len(RunDir(run).read_metrics()) if (run / "metrics.jsonl").exists() else 0


def trained_groups(run: Path) -> list[int]:
    return [number for record in RunDir(run).read_metrics() for number in record["groups"]]


def assert_whole(run: Path, num_steps: int) -> None:
    """Every step once and in order, every group once, the bound kept, the ledger closed."""
    metrics, num_groups = RunDir(run).read_metrics(), 4 * num_steps  # four in each batch
    assert [record["step"] for record in metrics] == list(range(1, num_steps + 1))
    assert sorted(trained_groups(run)) == list(range(num_groups))
    assert all(record["staleness/violations"] == 0 for record in metrics)
    ledger = RunDir(run).read_ledger()["ledger"]
    assert ledger["closes"] and ledger["trained"] == ledger["committed"] == num_groups


def assert_no_orphans(family: list[psutil.Process]) -> None:
    """They end by themselves when their supervisor is gone."""
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive, f"orphans: {alive}"


def test_fork_server_actor_hub_and_learner_are_killed_in_turn_and_the_run_finishes(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    num_steps = 45
    arguments = small_arguments(
        **{"max_steps": num_steps, "checkpoint.save_every": 7, "queue.max_staleness": 2, "actors.count": 2}
    )
    started = command(*arguments)
    run = tmp_path / "runs" / "quick"
    for role, at in (("fork_server", 1), ("actor", 3), ("hub", 12), ("learner", 24)):
        wait_for(lambda at=at: steps(run) >= at, f"step {at}")
        started.end(role)
    code, output = started.finish()
    assert code == 0, output
    for name in ("actor-", "hub", "learner"):
        assert f"{name}" in output and "signal 9" in output, output
    assert_whole(run, num_steps)
    assert RunDir(run).read_ledger()["ledger"]["failed"] >= 0


def test_stop_drains_checkpoints_and_resume_goes_on(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """By `stop`, which sends SIGTERM; Ctrl-C in the test below."""
    arguments = small_arguments(**{"max_steps": 100_000, "checkpoint.save_every": 100_000})
    started = command(*arguments)
    run = tmp_path / "runs" / "quick"
    wait_for(lambda: steps(run) >= 5, "step 5")
    code, output = command("stop", str(run)).finish()
    assert code == 0, output
    code, output = started.finish()
    assert code == 0 and "drained" in output, output
    reached = steps(run)
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert reached >= 5 and state["step"] == reached

    code, output = command("status", str(run), "--json").finish()
    found = json.loads(output)
    assert code == 0 and found["state"] == "stopped" and found["step"] == reached and found["hub"]["ledger"]["closes"]

    code, output = command(*arguments, "--resume", "--set", f"max_steps={reached + 8}").finish()
    assert code == 0, output
    assert_whole(run, reached + 8)

    logs = {log.name: log.stat().st_size for log in (run / "logs").iterdir()}
    code, output = command(*arguments, "--resume", "--set", f"max_steps={reached + 8}").finish()
    assert code == 0 and f"all steps done: {reached + 8} steps" in output, output
    assert {log.name: log.stat().st_size for log in (run / "logs").iterdir()} == logs, "a finished run starts no process"


@pytest.mark.rest
def test_a_signal_to_every_process_at_once_drains_and_the_same_command_goes_on(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As Slurm sends it before it requeues a job."""
    arguments = small_arguments(**{"max_steps": 100_000, "checkpoint.save_every": 100_000})
    started = command(*arguments)
    run = tmp_path / "runs" / "quick"
    wait_for(lambda: steps(run) >= 3, "step 3")
    os.killpg(started.process.pid, signal.SIGCONT)
    os.killpg(started.process.pid, signal.SIGTERM)
    code, output = started.finish()
    assert code == 0 and "drained" in output and RunDir(run).read_restarts() == {}, output
    reached = steps(run)
    code, output = command(*arguments, "--resume", "--set", f"max_steps={reached + 3}").finish()
    assert code == 0, output
    assert_whole(run, reached + 3)


def test_a_second_signal_forces(command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A reward that never ends keeps the drain waiting; the operator does not have to."""
    reward = tmp_path / "slow.py"
    reward.write_text("import time\ndef forever(completion):\n    time.sleep(1000)\n    return 1.0\n")
    started = command(*small_arguments(**{"rewards.functions": [f"{reward}:forever"], "scoring.timeout_s": 900.0}))
    run = tmp_path / "runs" / "quick"
    wait_for(lambda: RunDir(run).read_ledger().get("ledger", {}).get("leased"), "leased groups")
    family = started.family()
    started.process.send_signal(signal.SIGINT)
    wait_for(lambda: RunDir(run).read_ledger().get("state") == "draining", "the drain")
    started.process.send_signal(signal.SIGINT)
    code, output = started.finish()
    assert code == 130 and "--resume" in output, output
    assert_no_orphans(family)
