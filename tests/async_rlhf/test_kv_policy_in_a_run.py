"""A run whose engine keeps a part of its cache: its data are off-policy, and the metrics say how far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.run.run_dir import RunDir

pytestmark = pytest.mark.rest


def test_a_run_goes_on_with_an_engine_that_is_another_policy_and_says_how_far_it_is(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = {
        "name": "kept",
        "engine.kv_policy": "chunk_sink",
        "engine.kv": {"sinks": 2, "window": 12, "representatives": 4, "chunk": 6, "ends": [" "]},
        "queue.max_staleness": 0,
    }
    code, output = command(*small_arguments(**settings)).finish()
    assert code == 0, output
    records = RunDir(tmp_path / "runs" / "kept").read_metrics()
    assert len(records) == 4 and all(record["staleness/max"] == 0 and record["applied"] for record in records)
    assert all(record["mismatch/abs_log_ratio"] > 0.01 for record in records), "beyond what rounding makes"
    assert all(record["mismatch/kl"] > 0 and record["is/ess"] < 0.99 for record in records), "the weights are of both policies"
    assert all(record["canary/drift"] < 1e-3 for record in records), "with full attention it is the learner"
