"""The benchmark: turns, rows, the run of all parts; the sides of a part do the same work, and it runs on a small load. No rate
is asserted."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from async_rlhf.actors.rewards import resolve
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.experiments.throughput import __main__ as bench
from async_rlhf.experiments.throughput import growth, judges, pipeline
from async_rlhf.experiments.throughput.harness import MODEL, Bench, BenchmarkRow, MissingError, alternate, rates
from async_rlhf.experiments.throughput.judges import BATCH_SIZE
from async_rlhf.experiments.throughput.learner import bare, bare_batches, long_tailed, make_groups, ours
from async_rlhf.experiments.throughput.pipeline import (
    LOADS,
    MeasuredSteps,
    Recorded,
    in_window,
    make_endless,
    our_config,
    write_prompts,
)
from async_rlhf.experiments.throughput.queue import GROUP_SIZE, a_group, put_header
from async_rlhf.experiments.throughput.trl_async import PathAttention
from async_rlhf.launch.processor import processor
from tests.conftest import REPOSITORY


def test_sides_take_turns_in_alternating_order_and_the_first_turn_is_left_out() -> None:
    calls = list[str]()

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, turns=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_a_ratio_is_the_median_of_the_turns_ratios_with_lowest_and_highest() -> None:
    row = BenchmarkRow.of("load", rates(60.0, {"ours": [1.0, 2.0, 3.0], "other": [2.0, 2.0, 9.0]}), "tok/s", at_least=1.2)
    assert row.sides == {"ours": 30.0, "other": 30.0}
    assert (row.ratio, row.lowest, row.highest, row.turns) == (2.0, 1.0, 3.0, 3)
    assert str(row) == "load: ours 30 tok/s  other 30 tok/s; ratio 2 (1 to 3); turns 3; goal at least 1.2, reached"
    assert str(replace(row, foreign=0.4)).endswith("; not quiet: other programs used 40%, measure again")


def test_what_children_and_orphans_take_is_the_benchmarks_own() -> None:
    script = """
import subprocess, sys
from async_rlhf.experiments.throughput.harness import own_cpu_s
from async_rlhf.launch.forked import adopt_orphans
adopt_orphans()
before = own_cpu_s()
work = "import time; sum(range(20_000_000)); print(time.process_time())"
begins_it = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}])"
took = [subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout for code in (work, begins_it)]
assert own_cpu_s() - before >= 0.9 * sum(map(float, took)), (own_cpu_s() - before, took)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_part_without_its_package_or_the_load_that_is_wanted_says_so_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def part(bench: Bench) -> Iterator[BenchmarkRow]:
        if bench.load in "tiny, alone":
            yield BenchmarkRow.of("tiny, alone", {"bytes": [bench.slots or 1] * bench.num_turns(5)}, "bytes")
        if bench.slots:
            raise MissingError("vLLM is not installed")

    monkeypatch.setattr(bench, "load_part", lambda name: part)
    done = CliRunner().invoke(bench.app, ["engine", "--slots", "7", "--turns", "2", "--json"])
    row = json.loads(done.stdout)
    assert (row["part"], row["sides"], row["turns"]) == ("engine", {"bytes": 7}, 2)
    assert done.exit_code == bench.MISSING and "engine: vLLM is not installed" in done.output
    done = CliRunner().invoke(bench.app, ["learner", "--load", "tiny,alone"])
    assert done.exit_code == bench.NO_LOAD and "learner: none of its loads has 'tiny,alone' in its name" in done.output
    assert CliRunner().invoke(bench.app, ["learner", "--load", "alone"]).exit_code == 0


def test_every_part_is_there_and_another_is_refused_by_name() -> None:
    assert all(callable(bench.load_part(part)) for part in bench.PARTS)
    for words, message in (
        (["speed"], "there are engine, vllm_side"),
        (["queue", "--load", "64"], "--load is an option of engine,"),
    ):
        refused = CliRunner().invoke(bench.app, words)
        assert refused.exit_code == 2 and message in " ".join(refused.output.split())


def test_a_load_that_no_part_has_is_a_failure_and_one_of_another_part_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(part: str, options: list[str], quiet: bool) -> bench.Outcome:
        rows = (BenchmarkRow.of("equal", {"a": [1.0]}, "s"),) if (part, "equal") == ("engine", options[-1]) else ()
        return bench.Outcome("measured" if rows else "no load of this name", rows, 1.0)

    monkeypatch.setattr(bench, "measure", measure)
    for load, code in (("equal", 0), ("eqaul", 1)):
        words = ["engine", "learner", "--small", "--load", load, "--output", str(tmp_path / "rows.json")]
        assert CliRunner().invoke(bench.app, words).exit_code == code


def test_a_part_that_fails_is_named_at_the_end_and_the_others_are_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(part: str, options: list[str], quiet: bool) -> bench.Outcome:
        how = {"queue": "failed (1)", "vllm_side": "missing a package"}.get(part, "measured")
        own = ["--slots", "4"] if part in ("engine", "vllm_side") else []
        assert options == ["--json", "--small", "--turns", "2", *own]
        rows = (BenchmarkRow.of("load", {"a": [1.0], "b": [2.0]}, "s"),) if how == "measured" else ()
        return bench.Outcome(how, rows, 1.0)

    monkeypatch.setattr(bench, "measure", measure)
    done = CliRunner().invoke(bench.app, ["--output", str(tmp_path / "all.json"), "--small", "--turns", "2", "--slots", "4"])
    assert done.exit_code == 1
    assert "not measured: vllm_side (missing a package), queue (failed (1))" in done.output
    written = json.loads((tmp_path / "all.json").read_text())
    ((_, run),) = written["runs"].items()
    assert run["parts"].keys() == bench.PARTS.keys()
    assert run["machine"]["cores"] and run["machine"]["cpu"] == processor() and run["versions"]["torch"]
    assert run["commit"] or not (REPOSITORY / ".git").exists(), "an unpacked archive has none"
    assert len(written["rows"]) == len(bench.PARTS) - 2
    assert written["rows"][0].keys() == {"run", *asdict(BenchmarkRow.of("load", {"a": [1.0]}, "s"))}


@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=20), st.integers(1, 2), st.integers(0, 2))
def test_the_rate_and_the_mean_length_are_of_the_window_alone(seconds: list[float], first: int, last: int) -> None:
    steps = MeasuredSteps(first, len(seconds) - first - last, last)
    inside = seconds[first : first + steps.measured]
    tokens = [999] * first + [2 * BATCH_SIZE] * len(inside) + [999] * last
    rate, length = in_window(Recorded([*accumulate(seconds)], tokens), steps)
    assert rate == pytest.approx(BATCH_SIZE * len(inside) / sum(inside)) and length == 2.0
    with pytest.raises(ValueError, match=rf"ends with step {first + steps.measured}, the run had {first} steps"):
        in_window(Recorded(seconds[:first], tokens), steps)


@pytest.mark.parametrize("max_staleness", [0, 2, 8])
def test_no_measured_step_is_one_in_which_the_actor_had_no_more_to_do(max_staleness: int) -> None:
    steps = MeasuredSteps.of_asynchronous(max_staleness)
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
    for load, engine, device in product(LOADS, ("torch", "vllm"), ("cpu", "cuda")):
        config = our_config(load, MODEL, path, tmp_path, engine, device)
        assert config.placement.colocates == (config.learner.device == "cuda") == (device == "cuda")
        (spec,) = resolve(config.rewards.functions, tmp_path)
        assert spec.kind == ("async" if load.name == "slow" else "sync")
        assert config.groups_per_batch * config.generation.group_size == 128


@pytest.mark.filterwarnings("ignore::UserWarning")  # of TRL, about what it is used with
def test_attention_in_place_of_trls_kernel_is_that_of_each_completion_alone() -> None:
    from trl.experimental.async_grpo.packing import TreeRow, tree_attention

    row, texts = TreeRow(), ([1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 4, 7, 8, 9], [5, 5])
    for number, text in enumerate(texts):
        mask = torch.tensor([0] + [1] * (len(text) - 1))
        row.add({"input_ids": torch.tensor(text), "completion_mask": mask, "old_log_probs": torch.zeros(len(text)),
                 "advantage": 1.0, "group_id": number})  # fmt: skip
    packed, generator = row.pack(), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(packed["input_ids"]), 8, generator=generator) for heads in (4, 2, 2))
    segments = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed["tree_max_seqlens"].tolist(), strict=True))
    with mock.patch("trl.experimental.async_grpo.packing._flash_attn", PathAttention):
        module = torch.nn.Linear(1, 1)
        module.config = SimpleNamespace()
        found, _ = tree_attention(module, query, key, value, None, **segments, **longest, scaling=0.5)
    starts, paths = packed["tree_cu_seqlens_q"].tolist(), packed["tree_cu_seqlens_k"].tolist()
    for segment in range(len(starts) - 1):
        path = packed["tree_kv_index"][paths[segment] : paths[segment + 1]]
        k, v = (x[0, :, path].repeat_interleave(2, 0) for x in (key, value))
        for place in range(starts[segment], starts[segment + 1]):
            seen = int((path == place).nonzero()) + 1
            weights = (0.5 * query[0, :, place, None] @ k[:, :seen].transpose(1, 2)).softmax(-1)
            torch.testing.assert_close(found[0, place], (weights @ v[:, :seen])[:, 0])


def test_the_endless_model_has_the_same_weights_and_another_end(tmp_path: Path) -> None:
    endless = make_endless(MODEL, tmp_path / "endless")
    assert (endless / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(endless, local_files_only=True)
    assert tokenizer.eos_token_id == tokenizer.unk_token_id
    for name in ("config.json", "generation_config.json"):
        assert json.loads((endless / name).read_text())["eos_token_id"] == tokenizer.unk_token_id


def test_the_bare_loop_and_ours_make_steps_and_learn_from_the_same_tokens() -> None:
    groups = make_groups(long_tailed(3, 4), vocabulary=99)
    borne = sum(int(bears_loss.sum()) for _, _, bears_loss, _ in bare_batches(groups))
    assert borne == sum(group.num_tokens for group in groups)
    assert min(step().wall for step in (ours(MODEL, groups), bare(MODEL, groups))) > 0


def small_rows(part: str) -> list[dict[str, Any]]:
    """What this part prints of its small load."""
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", part, "--small", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # libraries warn there too


@pytest.mark.rest
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_trls_asynchronous_trainer_and_both_engines_of_ours_train_on_answers_of_the_same_length() -> None:
    (row,) = small_rows("asynchronous")
    assert row["sides"].keys() == {"ours", "trl", "ours_vllm"} and all(rate > 0 for rate in row["sides"].values())
    lengths = [row["figures"][f"{side}_mean_length"] for side in row["sides"]]
    assert max(lengths) < 1.1 * min(lengths)
    assert 0 < row["figures"]["trl_attention_forward_share"] < 1


@pytest.mark.rest
def test_a_small_run_of_images_has_prompts_of_their_length() -> None:
    (row,) = small_rows("images")
    assert row["sides"].keys() == {"images", "text and tower"} and row["ratio"] > 0
    assert 64 < row["figures"]["prompt_tokens"] < 80, "an image of 224 x 224 has 64"


@pytest.mark.rest
def test_a_small_run_of_the_queue_gives_every_number() -> None:
    rows = {row["load"]: row for row in small_rows("queue")}
    for load in ("2 KB a rollout, fsync group", "64 KB a rollout, fsync off"):
        assert rows[load]["ratio"] > 0 and rows[load]["figures"]["rollouts_per_s"] > 0
    waits = rows["put to take at 10,000 rollouts a second"]
    assert waits["figures"]["p99_ms"] >= waits["sides"]["wait"] > 0
    crowd = rows["64 clients beside 2"]
    assert crowd["ratio"] > 0 and crowd["figures"]["idle_percent"] >= 0


def test_a_producer_sends_what_an_actor_would() -> None:
    header, arrays = packing.pack_group(a_group(2048))
    frame = put_header(header.model_dump(), 7, 2, 3.0)
    _, put, _ = wire.decode([frame, *arrays], max_frame_bytes=1 << 20)
    timings = [{"put_s": 3.0, "generate_s": 1.5}] * GROUP_SIZE
    assert put == wire.Put(group=header.model_copy(update={"number": 7, "attempt": 2, "timings": timings}))


@pytest.mark.rest
def test_a_small_run_of_the_weights_measures_every_part() -> None:
    ratios = {row["load"]: row["ratio"] for row in small_rows("weights")}
    assert list(ratios) == ["seal", "adopt", "shared", "tcp", "delta", "device"] and min(ratios.values()) > 0


@pytest.mark.rest
def test_the_parts_of_a_learner_step_are_together_the_step() -> None:
    (row,) = small_rows("learner_parts")
    parts = {name: row["figures"][f"{name}_ms"] for name in ("batch", "forward", "backward", "optimizer", "rest")}
    assert min(parts.values()) > 0 and sum(parts.values()) == pytest.approx(row["sides"]["ours"], rel=0.01)
    assert 0 < row["sides"]["products"] < parts["forward"] + parts["backward"]


@pytest.mark.rest
def test_costs_are_measured_at_two_sizes_beside_the_work_and_drawn(tmp_path: Path) -> None:
    rows = list(growth.growth(Bench(small=True)))
    assert [row.load for row in rows] == [curve.title for curve in growth.curves()]
    assert all(len(row.sides) == 2 and row.ratio is not None and row.ratio > 0 for row in rows)
    (cache,) = (row.ratio for row in rows if row.unit == "bytes")
    assert cache is not None and cache <= 1.1
    bench.save(tmp_path / "growth.json", {"date": "2026-01-01"}, [replace(row, part="growth") for row in rows])
    growth.picture(tmp_path / "growth.json", tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_a_cost_that_grows_faster_than_its_work_misses_its_goal() -> None:
    for power, ratio in ((1, 1.0), (2, 16.0)):
        curve = growth.Curve("a, by size", "s", (2, 8, 32), lambda size, power=power: lambda: float(size**power), float)
        row = growth.row_of(curve, curve.sizes, 2)
        assert (row.ratio, row.figures) == (ratio, {"slope": power, "slope_of_work": 1.0})
        assert ("reached" in str(row)) == (power == 1)
