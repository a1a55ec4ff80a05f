"""The queue's benchmark runs to its end. No rate is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, _header, _map_head, a_group

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.rest
def test_a_small_run_gives_every_number() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_rlhf.experiments.throughput", "queue", "--small", "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["load"]: row for row in map(json.loads, done.stdout.splitlines())}
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
