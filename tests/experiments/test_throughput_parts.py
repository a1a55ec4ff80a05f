"""Parts of the benchmark on small loads: each runs to its end, and its numbers hang together. No rate is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgpack
import pytest

from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, _header, _map_head, a_group
from tests.conftest import REPOSITORY


def small_rows(part: str, *arguments: str) -> list[dict[str, Any]]:
    """What this part prints of its small load."""
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", part, "--small", "--json", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.rest
def test_a_small_run_of_the_queue_gives_every_number() -> None:
    rows = {row["load"]: row for row in small_rows("queue")}
    for load in ("2 KB a rollout, fsync group", "64 KB a rollout, fsync off"):
        assert rows[load]["ratio"] > 0 and rows[load]["figures"]["rollouts_per_s"] > 0
    waits = rows["put to take at 10,000 rollouts a second"]
    assert waits["figures"]["p99_ms"] >= waits["sides"]["wait"] > 0
    assert rows["hub memory"]["sides"]["queued"] > 0
    assert all(f"{name} a group of 8 x 2 KB" in rows for name in ("pack", "check", "unpack"))


def test_a_producer_sends_what_an_actor_would() -> None:
    header, arrays = packing.pack_group(a_group(2048))
    fields = header.model_dump()
    rest = {key: value for key, value in fields.items() if key not in ("number", "attempt", "timings")}
    encoded = msgpack.packb(rest)[_map_head(len(rest)) :]
    timings = [{"put_s": 3.0}] * GROUP_SIZE
    frame = _header(7, 2, timings, encoded, len(rest) + 3)
    _, put, _ = wire.decode([frame, *arrays], max_frame_bytes=1 << 20)
    assert put == wire.Put(group=header.model_copy(update={"number": 7, "attempt": 2, "timings": timings}))


@pytest.mark.rest
def test_a_small_run_of_the_weights_measures_every_part() -> None:
    rows = small_rows("weights")
    rates = [f"versions, learning rate {rate}" for rate in ("1e-04", "1e-05", "1e-06")]
    assert [row["load"] for row in rows] == ["adopt", "shared", "tcp", "delta", *rates]
    assert all(row["ratio"] > 0 for row in rows[:4])
    # One unit in the last place at most: the slower it learns, the fewer bfloat16 numbers change.
    for values in ([row["ratio"] for row in rows[4:]], [row["figures"]["changed"] for row in rows[4:]]):
        assert values == sorted(values, reverse=True)
    assert rows[4]["ratio"] < 0.25


@pytest.mark.rest
def test_a_small_whole_run_gives_its_first_step_and_the_memory_of_every_role() -> None:
    (row,) = small_rows("whole", "--load", "weights")
    assert row["load"].startswith("weights, ") and row["sides"]["first step"] > 0 and row["sides"]["bare"] > 0
    assert 0 < row["figures"]["system_share"] < 1
    assert all(row["figures"][f"{role}_mib"] > 10 for role in ("supervisor", "hub", "actor", "learner"))
