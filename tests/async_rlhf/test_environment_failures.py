"""An environment that does everything wrong in a real run: each failure has a name, is counted, and stays with its episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.run.run_dir import RunDir

ENVIRONMENT = """
import os
from async_rlhf import Score, environment

@environment(max_turns=4, timeout_s=10)
async def trouble(prompt, act):
    if act == "never yields": return
    text = yield prompt
    for turn in range(2):
        text = yield "on"
    if act == "yields 100 MB": yield "x" * 100_000_000
    if act == "exits": os._exit(7)
    if act == "fills the row": yield "x" * 200
    if act == "says nothing": yield ""
    if act == "goes on too long":
        while True: text = yield "on"
    yield Score(len(set(text)) / 10)
    yield "after its end"
"""
FAILURES = {
    "never yields": "it ended before the model wrote anything",
    "yields 100 MB": "returned 100000000 bytes, at most 1048576 are read",
    "exits": "its worker process ended with exit code 7",
    "says nothing": "its observation is empty: the model has nothing to read",
}
LIMITS = {"fills the row": "context", "goes on too long": "max_turns"}


def settings(folder: Path, acts: list[str], **others: Any) -> dict[str, Any]:
    (folder / "trouble.py").write_text(ENVIRONMENT)
    rows = [json.dumps({"prompt": f"word {number}", "act": act}) for number, act in enumerate(acts)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return {
        "data": {"source": str(folder / "rows.jsonl"), "held_out": 0, "options": {}},
        "environment": {"function": str(folder / "trouble.py:trouble")},
        "rewards.functions": [],
        "generation.max_episode_length": 80,
        **others,
    }


def test_every_way_to_fail_has_a_name_and_the_run_goes_on(small: Any, tmp_path: Path) -> None:
    acts = [*FAILURES, *LIMITS, "good", "good"]
    config = small(**settings(tmp_path, acts, **{"rewards.max_failed_ratio": 1.0, "queue.keep_rollouts": True, "max_steps": 2}))
    assert train(config, quiet=True).finished
    groups = [group for batch in read_batches(config.run_dir / "queue") for group in batch.groups]
    assert sorted(group.columns["act"] for group in groups) == sorted(acts)
    for group in groups:
        act, scores = group.columns["act"], [rollout.scores["trouble"] for rollout in group.rollouts]
        turns = {len(rollout.turn_lengths) for rollout in group.rollouts}
        if act in FAILURES:
            assert all((score.failure or "").startswith(FAILURES[act]) for score in scores), (act, scores)
            assert turns == ({1} if act == "never yields" else {3})
        elif act in LIMITS:
            assert {rollout.finish_reason for rollout in group.rollouts} == {LIMITS[act]}
            assert {score.value for score in scores} == {0.0} and turns == {4 if act == "goes on too long" else 3}
        else:
            assert all(score.value is not None for score in scores) and turns == {3}
    records = RunDir(config.run_dir).read_metrics()
    assert sum(record["rewards/trouble/failed_ratio"] * 4 for record in records) == pytest.approx(len(FAILURES))
