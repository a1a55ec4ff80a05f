"""The weights benchmark runs from end to end on a small set. No rate is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_small_benchmark_measures_every_part() -> None:
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput.weights", "--small", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["part"] for row in rows] == ["adopt", "shared", "tcp", "delta", *["versions"] * 3]
    assert all(row["ratio"] > 0 for row in rows[:4])
    # One unit in the last place at most: the slower it learns, the fewer bfloat16 numbers change.
    shares = [row["delta_share"] for row in rows[4:]]
    assert shares == sorted(shares, reverse=True) and shares[0] < 0.25
    assert [row["changed"] for row in rows[4:]] == sorted((row["changed"] for row in rows[4:]), reverse=True)
