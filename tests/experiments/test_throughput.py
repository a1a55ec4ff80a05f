"""The pipeline benchmark's arithmetic, its sleeps, and its options. No rate is measured here."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from async_rlhf.actors.rewards import resolve
from async_rlhf.experiments.throughput import judges, pipeline, trl
from async_rlhf.experiments.throughput.harness import MissingError
from async_rlhf.experiments.throughput.pipeline import (
    LOADS,
    Steps,
    make_endless,
    mean_length,
    our_config,
    window_rate,
    write_prompts,
)
from async_rlhf.experiments.throughput.trl import MODEL, trl_python
from async_rlhf.run.config_checks import check


def test_the_rate_counts_only_the_window() -> None:
    # 1 s a step inside the window, anything before and after it.
    ends = [0.0, 50.0, 51.0, 52.0, 53.0, 53.1]
    assert window_rate(ends, Steps(first=2, measured=3, last=1), batch_size=128) == pytest.approx(128.0)


@given(st.lists(st.floats(0.01, 10), min_size=5, max_size=20), st.floats(0.1, 10))
def test_a_machine_that_is_slower_by_a_factor_has_a_rate_lower_by_it(seconds: list[float], factor: float) -> None:
    steps = Steps(first=1, measured=len(seconds) - 1)
    fast = [sum(seconds[: i + 1]) for i in range(len(seconds))]
    slow = [end * factor for end in fast]
    assert window_rate(slow, steps, 8) * factor == pytest.approx(window_rate(fast, steps, 8))


def test_a_run_that_ended_inside_the_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="ends with step 13, the run had 4 steps"):
        window_rate([1.0, 2.0, 3.0, 4.0], Steps(first=3, measured=10), 128)


def test_the_mean_length_is_of_the_window_too() -> None:
    assert mean_length([999, 16, 32, 999], Steps(first=1, measured=2, last=1), batch_size=8) == 3.0


@pytest.mark.parametrize("max_staleness", [0, 2, 8])
def test_no_measured_step_is_one_in_which_the_actor_had_no_more_to_do(max_staleness: int) -> None:
    steps = Steps.of_ours(max_staleness)
    # The credit for the last group can be given this many steps before the run ends, not earlier.
    assert steps.first + steps.measured <= steps.total - (max_staleness + 1)
    assert steps.first > max_staleness + 1
    assert steps.measured >= 20


def test_sleeps_are_a_function_of_the_number_and_never_longer_than_the_cut() -> None:
    sleeps = [judges.sleep_seconds(number) for number in range(20_000)]
    assert sleeps == [judges.sleep_seconds(number) for number in range(20_000)]
    assert min(sleeps) > 0 and max(sleeps) == judges.LONGEST_S
    # The cut takes 0.008 off the mean of 0.25; three standard errors of 20,000 sleeps are 0.006.
    assert statistics.mean(sleeps) == pytest.approx(0.242, abs=0.006)
    assert statistics.median(sleeps) == pytest.approx(judges.MEAN_S / 2.718281828**0.5, rel=0.03)


def test_a_batch_waits_about_two_seconds_for_its_slowest_judge() -> None:
    slowest = [max(judges.sleep_seconds(number) for number in range(start, start + 128)) for start in range(0, 12_800, 128)]
    assert 1.5 < statistics.mean(slowest) < 2.5


async def test_both_judges_give_the_same_score() -> None:
    assert judges.similarity("nus", "nus") == 1.0
    assert judges.similarity("nusx", "nus") == 1.0
    assert judges.similarity("n", "nus") == pytest.approx(1 / 3)
    assert judges.similarity("", "nus") == 0.0
    assert await judges.slow_similarity("nub", "nus") == judges.similarity("nub", "nus")


def test_every_load_is_a_configuration_that_can_run(tmp_path: Path) -> None:
    for load in LOADS:
        config = our_config(load, MODEL, tmp_path / "prompts.jsonl", tmp_path)
        check(config)
        (spec,) = resolve(config.rewards.functions, tmp_path, {"answer"})
        assert spec.kind == ("async" if load.slow_reward else "sync")
        assert config.groups_per_batch * config.generation.group_size == 128


def test_prompts_are_written_with_their_answers(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_prompts(tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == pipeline.PROMPTS.size
    assert all(row["prompt"].endswith(row["answer"][::-1]) for row in rows)


def test_the_endless_model_has_the_same_weights_and_another_end(tmp_path: Path) -> None:
    endless = make_endless(MODEL, tmp_path / "endless")
    assert (endless / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(endless, local_files_only=True)
    assert tokenizer.eos_token_id == tokenizer.unk_token_id
    for name in ("config.json", "generation_config.json"):
        assert json.loads((endless / name).read_text())["eos_token_id"] == tokenizer.unk_token_id


def test_without_a_checkout_trl_is_missing_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"constraints\.txt does not exist"):
        trl_python(tmp_path)


def test_an_environment_that_is_there_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    python = tmp_path / ".venv-trl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / ".venv-trl" / ".installed").write_text(f"{trl.REQUIREMENT}\ntorch==2.13.0\n")
    assert trl_python(tmp_path) == python


def test_an_unknown_load_is_refused_before_anything_is_installed() -> None:
    command = [sys.executable, "-m", "async_rlhf.experiments.throughput", "pipeline", "--load", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "'natural', 'full', 'slow'" in done.stderr
