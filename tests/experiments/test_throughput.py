"""Parts of the benchmark: their sides do the same work, and each runs on a small load. No rate is asserted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from async_rlhf.actors.rewards import resolve
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput import judges, pipeline
from async_rlhf.experiments.throughput.harness import MODEL
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.learner import bare, bare_batches, diagnostics_seconds, long_tailed, make_groups, ours
from async_rlhf.experiments.throughput.pipeline import (
    LOADS,
    Recorded,
    Steps,
    in_window,
    make_endless,
    our_config,
    write_prompts,
)
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, a_group, put_header
from tests.conftest import REPOSITORY


@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=20), st.integers(1, 2), st.integers(0, 2))
def test_the_rate_and_the_mean_length_are_of_the_window_alone(seconds: list[float], first: int, last: int) -> None:
    steps = Steps(first, len(seconds) - first - last, last)
    inside = seconds[first : first + steps.measured]
    tokens = [999] * first + [2 * BATCH_SIZE] * len(inside) + [999] * last
    rate, length = in_window(Recorded([*accumulate(seconds)], tokens), steps)
    assert rate == pytest.approx(BATCH_SIZE * len(inside) / sum(inside)) and length == 2.0
    with pytest.raises(ValueError, match=rf"ends with step {first + steps.measured}, the run had {first} steps"):
        in_window(Recorded(seconds[:first], tokens), steps)


@pytest.mark.parametrize("max_staleness", [0, 2, 8])
def test_no_measured_step_is_one_in_which_the_actor_had_no_more_to_do(max_staleness: int) -> None:
    steps = Steps.of_ours(max_staleness)
    # The credit for the last group can be given this many steps before the run ends, not earlier.
    assert steps.first + steps.measured <= sum(steps) - (max_staleness + 1)
    assert steps.first > max_staleness + 1
    assert steps.measured >= 20


def test_sleeps_are_a_function_of_the_number_and_never_longer_than_the_cut() -> None:
    sleeps = [judges.sleep_seconds(number) for number in range(20_000)]
    assert sleeps == [judges.sleep_seconds(number) for number in range(20_000)]
    assert min(sleeps) > 0 and max(sleeps) == judges.LONGEST_S
    # The cut takes 0.008 off the mean of 0.25; three standard errors of 20,000 sleeps are 0.006.
    assert statistics.mean(sleeps) == pytest.approx(0.242, abs=0.006)
    assert statistics.median(sleeps) == pytest.approx(judges.MEAN_S / 2.718281828**0.5, rel=0.03)


def test_every_load_is_a_configuration_that_can_run_on_prompts_with_their_answers(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == pipeline.PROMPTS.size and all(row["prompt"].endswith(row["answer"][::-1]) for row in rows)
    for load in LOADS:
        config = our_config(load, MODEL, path, tmp_path)
        (spec,) = resolve(config.rewards.functions, tmp_path, {"answer"})
        assert spec.kind == ("async" if load.name == "slow" else "sync")
        assert config.groups_per_batch * config.generation.group_size == 128


def test_the_endless_model_has_the_same_weights_and_another_end(tmp_path: Path) -> None:
    endless = make_endless(MODEL, tmp_path / "endless")
    assert (endless / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(endless, local_files_only=True)
    assert tokenizer.eos_token_id == tokenizer.unk_token_id
    for name in ("config.json", "generation_config.json"):
        assert json.loads((endless / name).read_text())["eos_token_id"] == tokenizer.unk_token_id


def test_the_bare_loop_learns_from_the_tokens_that_we_learn_from() -> None:
    groups = make_groups(long_tailed(3, 4), vocabulary=99)
    borne = sum(int(bears_loss.sum()) for _, _, bears_loss, _ in bare_batches(groups))
    assert borne == sum(group.num_tokens for group in groups)


def test_every_side_of_this_process_makes_steps_and_diagnostics_are_a_part_of_ours() -> None:
    groups = make_groups(np.array([[3, 5], [2, 4]]), vocabulary=99)
    for step in (ours(MODEL, groups), bare(MODEL, groups)):
        assert step().wall > 0
    whole, diagnostics = diagnostics_seconds(MODEL, groups)
    assert 0 < diagnostics < whole


def small_rows(part: str, *arguments: str) -> list[dict[str, Any]]:
    """What this part prints of its small load."""
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", part, "--small", "--json", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # libraries warn there too


@pytest.mark.rest
def test_a_small_run_of_the_queue_gives_every_number() -> None:
    rows = {row["load"]: row for row in small_rows("queue")}
    for load in ("2 KB a rollout, fsync group", "64 KB a rollout, fsync off"):
        assert rows[load]["ratio"] > 0 and rows[load]["figures"]["rollouts_per_s"] > 0
    waits = rows["put to take at 10,000 rollouts a second"]
    assert waits["figures"]["p99_ms"] >= waits["sides"]["wait"] > 0
    assert rows["hub memory"]["sides"]["queued"] > 0


def test_a_producer_sends_what_an_actor_would() -> None:
    header, arrays = packing.pack_group(a_group(2048))
    frame = put_header(header.model_dump(), 7, 2, 3.0)
    _, put, _ = wire.decode([frame, *arrays], max_frame_bytes=1 << 20)
    timings = [{"put_s": 3.0, "generate_s": 1.5}] * GROUP_SIZE
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
