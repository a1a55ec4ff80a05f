"""Sizes from a `config.json`, held against the models that transformers builds from it; devices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.model_costs import read
from async_rlhf.experiments.planning.model.stages import catalogue
from tests.conftest import REPOSITORY

KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SMALL: dict[str, Any] = {**dict(zip(KEYS, (97, 24, 40, 3, 4, 2), strict=True)), "pad_token_id": 0}
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
# Small ones with each choice of a family, and published sizes.
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "num_key_value_heads": None, "tie_word_embeddings": True},
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    {"model_type": "mistral", **SMALL},
    {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    {"model_type": "qwen3", **SMALL},
    {"model_type": "qwen3", **SMALL, "head_dim": 16, "attention_bias": True},
    {"model_type": "gemma", **SMALL},
    {"model_type": "gemma2", **SMALL, "head_dim": 6},
    {"model_type": "gemma3_text", **SMALL},
    {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
]
LLAMA_8B = {"model_type": "llama", **dict(zip(KEYS, (128256, 4096, 14336, 32, 32, 8), strict=True))}
SIZES = dict(zip(KEYS, (32000, 4096, 14336, 32, 32, 8), strict=True))
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}


def transformers_config(config: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**config)


def built_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config", [*CONFIGS, LLAMA_8B, MIXTRAL], ids=lambda each: f"{each['model_type']}-{each['hidden_size']}"
)
def test_parameters_are_those_of_the_model_that_transformers_builds(config: dict[str, Any]) -> None:
    assert read(config).parameters == built_parameters(transformers_config(config))


def test_a_saved_configuration_is_read_as_it_lies_and_sizes_are_those_that_are_published() -> None:
    path = REPOSITORY / "configs" / "models" / "tiny-speller"
    saved, llama, mixtral = read(json.loads((path / "config.json").read_text())), read(LLAMA_8B), read(MIXTRAL)
    assert saved.parameters == built_parameters(AutoConfig.from_pretrained(path, trust_remote_code=False))
    assert (llama.parameters, llama.kv_bytes_per_token) == (8_030_261_248, 131_072)
    assert mixtral.parameters == 46_702_792_704 and mixtral.active_parameters == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize("config", CONFIGS[::2], ids=lambda config: str(config["model_type"]))
def test_flops_are_those_that_torch_counts(config: dict[str, Any]) -> None:
    tokens, costs = 16, read(config)
    model = AutoModelForCausalLM.from_config(
        transformers_config(config), trust_remote_code=False, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    # Eager attention computes the masked half too: each token meets all.
    assert counter.get_total_flops() == tokens * costs.forward_flops(tokens)


@given(st.integers(1, 200))
def test_a_sequence_is_the_sum_of_its_contexts(tokens: int) -> None:
    costs = read(CONFIGS[3])
    assert costs.sequence_flops(tokens) == sum(costs.forward_flops(context) for context in range(1, tokens + 1))
    assert costs.sequence_flops(tokens) - costs.sequence_flops(tokens, head=False) == 2 * tokens * 97 * 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' are not known; choose one of: gemma, "),
        ({"model_type": "mistrel"}, "did you mean 'mistral'"),
        ({"hidden_size": 0}, "hidden_size .* is 0: it must be a whole number"),
        ({"vocab_size": None}, "vocab_size .* is None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "= 3 of 2 experts; at most 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "without experts"),
    ],
)
def test_what_cannot_be_counted_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**CONFIGS[0], **changes})


def test_the_catalogue_has_the_devices_that_runs_are_planned_for_and_no_value_is_off_by_a_power_of_a_thousand() -> None:
    accelerators = {"A100-40GB", "A100-80GB", "A800", "H20", "H100", "H200", "H800", "B200", "MI300X", "L40S"}
    assert catalogue().keys() == accelerators | {"CPU"}
    for found in catalogue().values():
        assert found.memory_bytes_per_s > found.link_bytes_per_s >= found.network_bytes_per_s
        assert 30 < found.peak_flops / found.memory_bytes_per_s < 1000  # FLOPs for each byte read
        assert found.link_latency_s <= found.network_latency_s < 1e-3
