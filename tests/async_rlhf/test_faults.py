"""Anything may be killed: the run goes on, nothing is lost, nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Command, Train, assert_no_orphans, assert_whole, output_of, stdout_of, steps, wait_for


def test_fork_server_actor_hub_and_learner_are_killed_in_turn_and_the_run_finishes(training: Train) -> None:
    num_steps = 45
    started = training(**{"max_steps": num_steps, "checkpoint.save_every": 7, "queue.max_staleness": 2, "actors.count": 2})
    for role, at in (("fork_server", 1), ("actor", 3), ("hub", 12), ("learner", 24)):
        started.reach(at)
        started.end(role)
    started.ends_with(0, "actor-", "hub", "learner", "signal 9")
    assert_whole(started.run.path, num_steps)


def by_stop(started: Command, run: Path) -> None:
    output_of(0, "stop", run)


def as_slurm(started: Command, run: Path) -> None:
    """To every process at once, before it requeues a job."""
    os.killpg(started.process.pid, signal.SIGCONT)
    os.killpg(started.process.pid, signal.SIGTERM)


@pytest.mark.parametrize("stop", [by_stop, pytest.param(as_slurm, marks=pytest.mark.rest)])
def test_stop_drains_checkpoints_and_resume_goes_on(training: Train, stop: Callable[[Command, Path], None]) -> None:
    """By SIGTERM; Ctrl-C in the test below."""
    settings = {"max_steps": 100_000, "checkpoint.save_every": 100_000}
    started = training(**settings)
    run = started.run
    started.reach(5)
    stop(started, run.path)
    started.ends_with(0, "drained")
    reached = steps(run.path)
    state = json.loads((run.latest / "state.json").read_text())
    assert reached >= 5 and state["step"] == reached and run.read_restarts() == {}

    found = json.loads(stdout_of("status", run.path, "--json"))
    assert found["state"] == "stopped" and found["step"] == reached and found["hub"]["ledger"]["closes"]

    training("--resume", **settings | {"max_steps": reached + 8}).ends_with(0)
    assert_whole(run.path, reached + 8)

    logs = {log.name: log.stat().st_size for log in (run.path / "logs").iterdir()}
    training("--resume", **settings | {"max_steps": reached + 8}).ends_with(0, f"all steps done: {reached + 8} steps")
    assert {log.name: log.stat().st_size for log in (run.path / "logs").iterdir()} == logs, "a finished run starts no process"


def test_a_second_signal_forces(training: Train, tmp_path: Path) -> None:
    """A reward that never ends keeps the drain waiting; the operator does not have to."""
    reward = tmp_path / "slow.py"
    reward.write_text("import time\ndef forever(completion):\n    time.sleep(1000)\n    return 1.0\n")
    started = training(**{"rewards.functions": [f"{reward}:forever"], "scoring.timeout_s": 900.0})
    run = started.run
    wait_for(lambda: run.read_ledger().get("ledger", {}).get("leased"), "leased groups")
    family = started.family()
    started.process.send_signal(signal.SIGINT)
    wait_for(lambda: run.read_ledger().get("state") == "draining", "the drain")
    started.process.send_signal(signal.SIGINT)
    started.ends_with(130, "--resume")
    assert_no_orphans(family)
