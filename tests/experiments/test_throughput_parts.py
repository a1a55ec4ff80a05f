"""Parts of the benchmark on small loads: each runs to its end, and its numbers hang together. No rate is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgpack
import pytest

from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput import updates
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, _header, _map_head, a_group
from tests.conftest import REPOSITORY


def small_rows(part: str) -> list[dict[str, Any]]:
    """What this part prints of its small load."""
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", part, "--small", "--json"]
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


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_an_update_is_measured_in_every_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "SEQUENCES", 3)
    monkeypatch.setattr(updates, "STEPS_BETWEEN", 3)
    monkeypatch.setattr(updates, "COMPLETION_TOKENS", (3, 12))
    row = updates.measure_update(mode, 2).row()
    assert (row.load, row.turns) == (mode, 2)
    gap, last = row.sides["gap"], row.figures["all_on_p99_ms"]
    assert gap is not None and last is not None and 0 < gap <= (row.figures["gap_p99_ms"] or 0) and gap <= last


def test_the_first_token_is_measured_with_and_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LONG_PROMPT", 40)
    row = updates.measure_first_token(1)
    assert row.sides["apart"] and row.sides["shared"]
    assert row.ratio == pytest.approx(row.sides["apart"] / row.sides["shared"], rel=0.05)
