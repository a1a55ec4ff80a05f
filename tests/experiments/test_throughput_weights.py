"""The weights benchmark runs from end to end on a small set. No rate is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_small_benchmark_measures_every_part() -> None:
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", "weights", "--small", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    rates = [f"versions, learning rate {rate}" for rate in ("1e-04", "1e-05", "1e-06")]
    assert [row["load"] for row in rows] == ["adopt", "shared", "tcp", "delta", *rates]
    assert all(row["ratio"] > 0 for row in rows[:4])
    # One unit in the last place at most: the slower it learns, the fewer bfloat16 numbers change.
    for values in ([row["ratio"] for row in rows[4:]], [row["figures"]["changed"] for row in rows[4:]]):
        assert values == sorted(values, reverse=True)
    assert rows[4]["ratio"] < 0.25
