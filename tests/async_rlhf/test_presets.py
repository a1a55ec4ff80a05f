"""The shipped configurations run end to end at reduced length, over real processes, and do what they are for."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from async_rlhf import Score
from async_rlhf.actors.environments import load as load_environment
from async_rlhf.actors.scoring.models import RewardModel
from async_rlhf.api import TrainResult, train
from async_rlhf.experiments.warm_start.speller import INSTRUCTION
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import environment_specs
from tests.conftest import QUICK, SMALL, Start, has_ended, sets, wait_for

CONFIGS = QUICK.parent
START = load_file(CONFIGS / "models" / "tiny-speller" / "model.safetensors")
JUDGE = CONFIGS / "models" / "tiny-judge"


def moved(run: RunDir) -> set[str]:
    """The parameters that have changed."""
    trained = load_file(run.latest / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in trained.items()} == {name: tensor.shape for name, tensor in START.items()}
    return {name for name in START if not START[name].equal(trained[name])}


def decoupled(result: TrainResult, run: RunDir) -> None:
    """It trains on old truncated data under its masks and its guard."""
    # the first batch is the learner's own, and its ratios are to what was sampled from
    assert result.metrics[0]["mismatch/abs_log_ratio"] < 1e-4 and result.metrics[0]["is/ess"] > 0.999
    for record in result.metrics:
        assert 0 <= record["staleness/target"] <= 8 and record["staleness/max"] <= 8
        assert 0 <= record["is/masked_ratio"] <= 1 and record["is/weight_mean"] <= 2.0
        assert set(record["drift/by_staleness"]) <= set(record["staleness/histogram"])


def online_dpo(result: TrainResult, run: RunDir) -> None:
    """It learns from one pair a group."""
    groups = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    for record in [record for record in result.metrics if record["applied"]]:
        assert 0 <= record["dpo/accuracy"] <= 1 and "kl/reference" in record
        chosen = [[r for r in g["rollouts"] if r["advantage"] is not None] for g in groups if g["step"] == record["step"]]
        assert sorted(map(len, chosen)) == [0] * record["groups/zero_advantage"] + [2] * (4 - record["groups/zero_advantage"])
        trained = sum(point["tokens"] for point in record["drift/by_staleness"].values())
        assert trained == sum(len(rollout["tokens"]) for pair in chosen for rollout in pair)
    assert abs(result.metrics[0]["kl/reference"]) < 1e-5  # the policy is still the initial model


def lora(result: TrainResult, run: RunDir) -> None:
    """Adapters learn, and actors adopt them."""
    assert moved(run) and all("proj" in name for name in moved(run))
    assert (run.latest / "adapter" / "adapter_model.safetensors").exists()


def zero3(result: TrainResult, run: RunDir) -> None:
    """Ranks share rows or layers, and publish all of them."""
    assert moved(run) == START.keys()


def ppo_rlhf(result: TrainResult, run: RunDir) -> None:
    """It learns from the reward model, with a critic and a reference."""
    for record in result.metrics:
        assert record["staleness/max"] == 0 and record["rewards/failed_ratio"] == 0
        assert record["critic/loss"] > 0 and "kl/reference" in record
        # only the judge is rewarded, in running deviations of what was seen so far; the task itself is measured
        assert 0 <= record["rewards/reasoning_gym/mean"] <= 1 and record["rewards/reward_model/mean"] is not None
    assert abs(result.metrics[0]["reward"]) < 1e-6 and abs(result.metrics[0]["kl/reference"]) < 1e-5
    assert moved(run) and (run.latest / "critic.safetensors").exists()


def sao(result: TrainResult, run: RunDir) -> None:
    """It learns from groups of one, with a critic whose attention stays what the policy's was."""
    for record in result.metrics:
        assert record["critic/loss"] > 0 and record["staleness/max"] <= 8 and record["groups/zero_advantage"] == 0
    assert moved(run) == START.keys()
    critic = load_file(run.latest / "critic.safetensors")
    of_trunk = {name: critic["trunk." + name.removeprefix("model.")] for name in START if name.startswith("model.")}
    frozen = {name for name, tensor in of_trunk.items() if tensor.equal(START[name])}
    assert frozen == {name for name in of_trunk if ".self_attn." in name}


def quick(result: TrainResult, run: RunDir) -> None:
    """An engine that keeps a part of its cache is another policy, and the metrics say how far."""
    assert all(record["staleness/max"] == 0 and record["applied"] for record in result.metrics)
    assert all(record["mismatch/abs_log_ratio"] > 0.01 for record in result.metrics), "beyond what rounding makes"
    assert all(record["mismatch/kl"] > 0 and record["is/ess"] < 0.99 for record in result.metrics), "weights of both policies"


KEPT = {"policy": "chunk_sink", "sinks": 2, "window": 12, "representatives": 4, "chunk": 6, "ends": [" "]}
RUNS: list[tuple[Callable[[TrainResult, RunDir], None], dict[str, Any]]] = [
    (decoupled, {"learner.updates_per_step": 2, "generation.top_p": 0.9}),
    (online_dpo, {"sampled_groups": 4}),
    (lora, {"max_steps": 3}),
    (zero3, {"max_steps": 3, "learner.sequence_parallel": 2}),
    (zero3, {"max_steps": 3, "learner.tensor_parallel": 2}),
    (ppo_rlhf, {"max_steps": 3, "learner.critic.warmup_steps": 1}),
    (sao, {"generation.group_size": 1, "learner.critic.warmup_steps": 1}),
    (quick, {"queue.max_staleness": 0, "engine.kv": KEPT}),
]


@pytest.mark.parametrize(
    ("check", "changed"),
    [pytest.param(*run, marks=[] if run[0] is decoupled else pytest.mark.rest) for run in RUNS],
    ids=[f"{check.__name__}-{list(changed)[-1]}" for check, changed in RUNS],
)
def test_a_preset_trains_and_does_what_it_is_for(
    check: Callable[[TrainResult, RunDir], None], changed: dict[str, Any], tmp_path: Path
) -> None:
    overrides = {**SMALL, "output_dir": str(tmp_path / "runs"), **changed}
    result = train(CONFIGS / f"{check.__name__}.toml", overrides=overrides, quiet=True)
    assert result.finished and len(result.metrics) == overrides["max_steps"]
    for record in result.metrics:
        assert record["applied"] or record["groups/zero_advantage"] == 4
        assert record["staleness/violations"] == 0
    run = RunDir(result.run_dir)
    assert result.metrics[-1]["canary/drift"] < 1e-3 and run.read_ledger()["ledger"]["closes"]
    check(result, run)


@pytest.mark.rest
def test_a_learner_that_loses_a_rank_says_which_and_goes_on_from_its_checkpoint(
    command: Start, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """ZeRO-3 on two ranks: real processes, published weights verified by the actor. A rank is aborted, as nccl does it, where
    it waits for the other, which stands still and ends with it. The run then goes on for two steps with one rank and plain
    torch."""
    num_steps = 60
    _, _, *overrides = small_arguments(**{"max_steps": num_steps, "checkpoint.save_every": 2})
    started = command("train", str(CONFIGS / "zero3.toml"), *overrides)
    directory = tmp_path / "runs" / "zero3"
    wait_for(lambda: (directory / "checkpoints" / "latest").exists(), "a checkpoint")
    learner = started.child("learner")
    rank = started.child("learner_rank")
    learner.suspend()
    wait_for(lambda: rank.status() == psutil.STATUS_SLEEPING, "a rank that waits")
    rank.send_signal(signal.SIGABRT)
    output = started.ends_with(0, "rank 1 ended by signal 6 (SIGABRT)")
    assert output.count("starting it again") == 1, output
    assert has_ended(rank) and has_ended(learner)
    more = sets({"max_steps": num_steps + 2, "learner.ranks": 1, "learner.backend": "torch"})
    command("train", str(CONFIGS / "zero3.toml"), *overrides, *more, "--resume").ends_with(0)
    run = RunDir(directory)
    metrics = run.read_metrics()
    assert [record["step"] for record in metrics] == list(range(1, num_steps + 3))
    assert all(record["applied"] for record in metrics) and metrics[-1]["canary/drift"] < 1e-3
    assert run.read_ledger()["ledger"]["closes"]


# Environments


@pytest.mark.parametrize("name", ["tools", "game"])
def test_a_shipped_environment_passes_the_check_before_a_run(name: str) -> None:
    assert preflight(load(CONFIGS / f"{name}.toml")).num_prompts > 0


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        (("I say 9.", "2, then", "5"), 1.0),
        (("none", "9", "12", "3"), 0.25),
        (("0", "6", "20", "7"), 0.125),
    ],  # 12 is not below 9
)
def test_the_game_for_a_chat_model_scores_a_hit_or_what_agrees_with_its_answers(turns: tuple[str, ...], score: float) -> None:
    config = load(CONFIGS / "chat_game.toml", {"model": "tiny-speller"})
    spec = environment_specs(config)[""]
    assert config.data.chat
    game = load_environment(spec)(prompt="Guess.", answer=5)
    said = [game.send(text) for text in (None, *turns)]
    assert said[0] == "Guess." and said[-1] == Score(score)


@pytest.mark.rest
def test_the_model_learns_to_call_the_calculator(command: Start, tmp_path: Path) -> None:
    """From no held-out product to nearly all, in 60 steps; it cannot multiply."""
    started = command("train", str(CONFIGS / "tools.toml"), "--set", f"output_dir={tmp_path}")
    output = started.ends_with(0, "held-out accuracy at the start: 0.0")
    (line,) = [line for line in output.splitlines() if line.startswith("held-out accuracy at the end")]
    assert float(line.split(": ")[1].split(",")[0]) >= 0.8, output
    records = RunDir(tmp_path / "tools").read_metrics()
    assert records[-1]["episodes/mean_turns"] > 1.6 > 1.4 > records[0]["episodes/mean_turns"]
    assert records[-1]["reported/calculator/calls"] > 0.6 > 0.4 > records[0]["reported/calculator/calls"]


def test_the_shipped_reward_model_is_small_and_ranks_what_it_was_shown() -> None:
    assert (JUDGE / "model.safetensors").stat().st_size < 2_000_000
    prompt = INSTRUCTION + "lemon"
    right, nearly, copied, repeated = RewardModel(JUDGE).score([prompt] * 4, ["nomel", "nomle", "lemon", "lllll"], 128)
    assert right > copied > repeated and right > nearly
    quality = json.loads((JUDGE / "quality.json").read_text())
    assert quality["after"]["accuracy"] > 0.75 and quality["gold"] > 0.9
