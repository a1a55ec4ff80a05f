"""Settings of the machine that cannot work are refused with the nearest that can."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.check import check_division, check_machine, remarks
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.step.deepspeed_machine import deepspeed_settings

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "more ranks than groups": (
        {"ranks": 5},
        r"learner.ranks = 5 cannot share an update of 4 groups.*Highest: learner.ranks = 4",
    ),
    "more ranks than groups of an update": (
        {"ranks": 3, "updates_per_step": 2},
        "of 2 groups.*Highest: learner.ranks = 2",
    ),
    "one device for all": ({"ranks": 2, "device": "cuda:1"}, "'cuda:1' is one device for 2 ranks; 'cuda' gives every rank"),
    "a fall without an end": ({"schedule": "cosine"}, "needs learner.schedule_steps; over the whole run: 100"),
    "a fall before the rise": ({"schedule": "linear", "schedule_steps": 5, "warmup_steps": 5}, "within the warm-up.*lowest: 6"),
    "a fall upwards": ({"learning_rate": 1e-4, "final_learning_rate": 1e-3}, "highest: 0.0001"),
    "DeepSpeed's file without it": ({"deepspeed_config": "ds.json"}, "is for learner.backend = 'deepspeed'"),
    "compiled with DeepSpeed": ({"backend": "deepspeed", "compile": True}, "set learner.compile = false, or learner.backend ="),
    "no such file": ({"backend": "deepspeed", "deepspeed_config": "/nowhere/ds.json"}, "'/nowhere/ds.json' is no file"),
    "half of the ranks share a row": (
        {"sequence_parallel": 2, "ranks": 4, "backend": "deepspeed"},
        "all ranks share a row, or none; set it to 4 or 1",
    ),
    "rows shared without DeepSpeed": ({"sequence_parallel": 2, "ranks": 2}, "set learner.backend = 'deepspeed'"),
    "rows shared with a critic": (
        {"sequence_parallel": 2, "ranks": 2, "backend": "deepspeed", "critic": {"kind": "head"}},
        "with a critic, which ranks do not share; set it to 1, or learner.critic.kind = 'none'",
    ),
    "half of the ranks share the layers": (
        {"tensor_parallel": 2, "ranks": 4, "backend": "deepspeed"},
        "learner.tensor_parallel = 2 of learner.ranks = 4: .*set it to 4 or 1",
    ),
    "layers shared without DeepSpeed": ({"tensor_parallel": 2, "ranks": 2}, "or learner.tensor_parallel = 1"),
    "layers shared with a critic": (
        {"tensor_parallel": 2, "ranks": 2, "backend": "deepspeed", "critic": {"kind": "model"}},
        "set it to 1, or learner.critic.kind = 'none'",
    ),
    "layers shared with adapters": (
        {"tensor_parallel": 2, "ranks": 2, "backend": "deepspeed", "lora": {"rank": 4}},
        "with adapters, whose layers are not split; set it to 1, or learner.lora.rank = 0",
    ),
    "rows and layers shared": (
        {"tensor_parallel": 2, "sequence_parallel": 2, "ranks": 2, "backend": "deepspeed"},
        "ranks share positions or layers; set one of them to 1",
    ),
    "an adapter of rank 0": ({"lora": {"publish": "adapter"}}, "there is no adapter. Set learner.lora.rank = 8"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_with_what_can(case: str) -> None:
    settings, message = CASES[case]
    with pytest.raises(ConfigError) as raised:
        check_machine(LearnerConfig(**settings), groups_per_batch=4, max_steps=100)
    assert re.search(message, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("setting", "choice"),
    [
        ("sequence_parallel", "num_attention_heads = 12, num_key_value_heads = 6; choose 1, 2, 3, 6"),
        ("tensor_parallel", "num_attention_heads = 12, num_key_value_heads = 6, intermediate_size = 32; choose 1, 2"),
    ],
)
def test_ranks_that_do_not_divide_what_they_share_are_refused_with_what_does(setting: str, choice: str) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 32}
    config = LearnerConfig(backend="deepspeed", ranks=4, **{setting: 4})
    with pytest.raises(ConfigError, match=f"learner.{setting} = 4 does not divide all of the model's {choice}"):
        check_division(config, sizes.get)
    check_division(LearnerConfig(backend="deepspeed", ranks=2, **{setting: 2}), sizes.get)
    check_division(LearnerConfig(ranks=4), sizes.get)


DEEPSPEED_FILES = {
    "not json": ("{", "cannot be read"),
    "a list": ("[]", "must hold one JSON object"),
    "what the run decides": ('{"optimizer": {}, "train_batch_size": 8}', "sets train_batch_size, optimizer, which"),
    "ranks that share a layer": ('{"tensor_parallel": {"autotp_size": 2}}', "sets tensor_parallel, which"),
    "another stage": ('{"zero_optimization": {"stage": 1}}', "asks for ZeRO stage 1; set learner.zero_stage = 1"),
}


@pytest.mark.parametrize("case", DEEPSPEED_FILES)
def test_a_deepspeed_file_that_contradicts_the_run_is_refused(case: str, tmp_path: Path) -> None:
    text, message = DEEPSPEED_FILES[case]
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        deepspeed_settings(LearnerConfig(backend="deepspeed", deepspeed_config=str(tmp_path / "ds.json")))


def test_a_deepspeed_file_is_laid_over_ours(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": true}')
    config = LearnerConfig(backend="deepspeed", zero_stage=3, dtype="bfloat16", deepspeed_config=str(tmp_path / "ds.json"))
    settings = deepspeed_settings(config)
    assert settings["zero_optimization"] | {"stage": 3, "reduce_bucket_size": 7} == settings["zero_optimization"]
    assert settings["wall_clock_breakdown"] and settings["bf16"]["enabled"] and settings["gradient_clipping"] == 1.0


def test_products_in_float32_on_a_gpu_are_remarked_upon() -> None:
    (remark,) = remarks(LearnerConfig(device="cuda:1"))
    assert re.search("'float32' on learner.device = 'cuda:1'.*Set learner.dtype = 'bfloat16'", remark)
    assert remarks(LearnerConfig()) == remarks(LearnerConfig(device="cuda", dtype="bfloat16")) == ()
