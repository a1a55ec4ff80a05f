"""A learner whose disk fills up waits, says so, and goes on by itself; its record has no hole and nothing half written."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.conftest import Train, assert_whole, steps, wait_for

pytestmark = pytest.mark.rest

NUM_STEPS = 150


def test_the_learner_waits_for_room_and_the_run_is_whole(training: Train) -> None:
    # a weight set in shared memory is a file too
    started = training(**{"max_steps": NUM_STEPS, "weights.transport": "chunks", "checkpoint.save_every": 3})
    run, learner = started.run, started.child("learner")
    started.reach(4)
    no_limit = learner.rlimit(psutil.RLIMIT_FSIZE)
    learner.rlimit(psutil.RLIMIT_FSIZE, (run.metrics.stat().st_size + 100, no_limit[1]))
    wait_for(lambda: "the disk is full: step" in run.log("learner").read_text(), "a learner that waits for room")
    before = steps(run.path)
    assert before < NUM_STEPS, "the run was over before the disk was full: give it more steps"
    learner.rlimit(psutil.RLIMIT_FSIZE, no_limit)
    assert "learner ended" not in started.ends_with(0)
    assert_whole(run.path, NUM_STEPS)
    assert "there is room on the disk again" in run.log("learner").read_text()
    last = run.read_metrics()[-1]
    sampled = [json.loads(line)["step"] for line in (run.path / "rollouts.jsonl").read_text().splitlines()]
    missing = NUM_STEPS * run.config().sampled_groups - len(sampled)
    assert sampled == sorted(sampled) and missing == last["records/lost_lines"]
