"""Replay of experts as a setting of a run: what cannot be had is refused, what is left out is remarked on, and a run trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.experiments.doctor import families
from async_rlhf.run.checks.model import check_routing
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from async_rlhf.run.processes.agreement import schema
from tests.actors.vllm_model import SHIPPED
from tests.conftest import QUICK

REPLAYED = {"engine.replay_routing": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, 2 of 4 experts in 4 layers, with the shipped tokenizer."""
    path = tmp_path_factory.mktemp("moe")
    vocabulary = json.loads((SHIPPED / "config.json").read_text())["vocab_size"]
    families.model("qwen3_moe", vocab_size=vocabulary, max_position_embeddings=512, sliding_window=None).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SHIPPED / name, path / name)
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learner.compile", True, "= true: .* Set learner.compile = false, or engine.replay_routing = false"),
        ("learner.sequence_parallel", 2, "= 2: .* Set learner.sequence_parallel = 1, or"),
        ("learner.tensor_parallel", 2, "= 2: .* Set learner.tensor_parallel = 1, or"),
    ],
)
def test_what_cannot_replay_is_refused_by_name(moe: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.replay_routing = true with {key} {message}"):
        load(QUICK, {"model": str(moe), key: value, **REPLAYED})


def test_an_engine_that_cannot_record_experts_has_no_such_key_and_a_part_of_a_cache_has_not_all(moe: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'engine\.replay_routing' = True: engine\.kind = 'vllm' has .* it is one of 'torch'"
    ):
        load(QUICK, {"model": str(moe), "engine.kind": "vllm", **REPLAYED})
    kept = {"engine.kv": {"policy": "window", "window": 16}}
    with pytest.raises(
        ConfigError, match=r"true with engine\.kv\.policy = 'window': experts .*Set engine\.kv\.policy = 'full', or"
    ):
        load(QUICK, {"model": str(moe), **kept, **REPLAYED})


def test_a_model_with_experts_is_not_batch_invariant(moe: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant = true with model type 'qwen3_moe'; only plain Llama can"):
        load(QUICK, {"model": str(moe), "engine.batch_invariant": True})


def test_a_model_without_experts_is_refused_and_a_group_that_is_too_large(moe: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay_routing = true with model type 'llama'.*use one of deepseek_v3, dots1"):
        load(QUICK, REPLAYED)
    # 64 MiB at 8 bytes a token, without 96 of the prompt, over 8 completions
    config = load(QUICK, {"model": str(moe), **REPLAYED, "generation.max_completion_length": 1 << 21})
    with pytest.raises(ConfigError, match=r"at 8 bytes a token a group of 8 can have more than 64 MiB.*highest: 1048564"):
        list(check_routing(config))
    assert config.engine.records_routing and not config.served_engine.plain.records_routing


def test_without_it_check_says_what_it_costs(moe: Path, small: Any) -> None:
    (remark,) = (each for each in preflight(small(model=str(moe))).remarks if "experts" in each)
    assert (
        "2 of 4 experts in each of 4 layers are not recorded: engine and learner choose apart" in remark
        and "engine.replay_routing = true (engine.kind = 'torch') takes 8 bytes a token in the journal" in remark
    )
    assert not any("experts" in each for each in preflight(small(model=str(moe), **REPLAYED)).remarks)
    assert schema(small(model=str(moe))).routing is not None and schema(small()).routing is None


@pytest.mark.rest
def test_twenty_steps_are_trained_with_the_experts_that_sampled_and_a_killed_run_goes_on(moe: Path, tmp_path: Path) -> None:
    overrides = {
        "model": str(moe), "output_dir": str(tmp_path), "name": "run", "max_steps": 12, "data.held_out": 0, "data.size": 512,
        "learner.batch_size": 16, "engine.slots": 16, "queue.keep_rollouts": True, "generation.max_completion_length": 16,
        "learner.learning_rate": 1e-3, **REPLAYED,
    }  # fmt: skip
    train("quick", quiet=True, overrides=overrides)
    result = train("quick", quiet=True, overrides=overrides | {"max_steps": 20}, resume=True)
    assert [record["step"] for record in result.metrics] == list(range(1, 21)) and all(
        each["applied"] for each in result.metrics
    )
    groups = [group for batch in read_batches(tmp_path / "run" / "queue") for group in batch.groups]
    assert len(groups) == 20 * 2
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.routing is not None and rollout.routing.shape[1:] == (4, 2)
