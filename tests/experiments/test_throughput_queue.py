"""The queue's benchmark runs to its end; how fast is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgpack

from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, a_group
from async_rlhf.experiments.throughput.queue_producer import _header, _map_head

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_small_run_gives_every_number() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_rlhf.experiments.throughput.queue", "--small", "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *loads, rest = map(json.loads, done.stdout.splitlines())
    assert [(load["load"], load["fsync"]) for load in loads] == [("2 KB", "group"), ("64 KB", "off")]
    assert all(load["ratio"] > 0 and load["rollouts_s"] > 0 for load in loads)
    assert rest["put_to_take"]["p99_ms"] >= rest["put_to_take"]["p50_ms"] > 0
    assert rest["memory"]["queued_mib"] > 0 and set(rest["packing_us"]) == {"pack", "check", "unpack"}


def test_a_producer_sends_what_an_actor_would() -> None:
    header, arrays = packing.pack_group(a_group(2048))
    fields = header.model_dump()
    rest = {key: value for key, value in fields.items() if key not in ("number", "attempt", "timings")}
    encoded = msgpack.packb(rest)[_map_head(len(rest)) :]
    timings = [{"put_s": 3.0}] * GROUP_SIZE
    frame = _header(7, 2, timings, encoded, len(rest) + 3)
    _, put, _ = wire.decode([frame, *arrays], max_frame_bytes=1 << 20)
    assert put == wire.Put(group=header.model_copy(update={"number": 7, "attempt": 2, "timings": timings}))
