"""Counts from a `config.json`, held against the models that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, read

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def real(vocabulary: int, hidden: int, width: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(keys, (vocabulary, hidden, width, layers, heads, kv_heads), strict=True))


# Small ones with each choice of a family, and published sizes.
CONFIGS: list[dict[str, object]] = [
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
    {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 8,
        "moe_intermediate_size": 12,
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
    {"model_type": "llama", **real(128256, 4096, 14336, 32, 32, 8)},
    {"model_type": "qwen2", **real(151936, 896, 4864, 24, 14, 2), "tie_word_embeddings": True},
    {"model_type": "qwen3", **real(151936, 4096, 12288, 36, 32, 8), "head_dim": 128},
    {"model_type": "mixtral", **real(32000, 4096, 14336, 32, 32, 8), "num_local_experts": 8, "num_experts_per_tok": 2},
]


def of(config: dict[str, object], **changes: object) -> ModelCosts:
    return read({**config, **changes})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{config['hidden_size']}")
def test_parameters_are_those_of_the_model_that_transformers_builds(config: dict[str, object]) -> None:
    words = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(str(config["model_type"]), **words), trust_remote_code=False
        )
    assert read(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["tiny-player", "tiny-speller"])
def test_a_saved_configuration_is_read_as_it_lies(name: str) -> None:
    path = Path(__file__).parents[2] / "configs" / "models" / name / "config.json"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent), trust_remote_code=False)
    assert read(json.loads(path.read_text())).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    assert of(CONFIGS[12]).parameters == 8_030_261_248  # Llama 3.1 8B
    assert of(CONFIGS[15]).parameters == 46_702_792_704  # Mixtral 8x7B
    assert of(CONFIGS[15]).active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert of(CONFIGS[12]).kv_bytes_per_token == 131_072


@pytest.mark.parametrize("config", CONFIGS[:12:2], ids=lambda config: str(config["model_type"]))
def test_flops_are_those_that_torch_counts(config: dict[str, object]) -> None:
    words = {key: value for key, value in config.items() if key != "model_type"}
    tokens, costs = 16, read(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(str(config["model_type"]), **words),
        trust_remote_code=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    # Eager attention computes the masked half too: each token meets all.
    assert counter.get_total_flops() == tokens * costs.forward_flops(tokens)


@given(st.integers(1, 200))
def test_a_sequence_is_the_sum_of_its_tokens(tokens: int) -> None:
    costs = of(CONFIGS[3])
    assert costs.sequence_flops(tokens) == sum(costs.forward_flops(context) for context in range(1, tokens + 1))
    assert costs.sequence_flops(tokens) - costs.sequence_flops(tokens, head=False) == 2 * tokens * 97 * 24


@given(st.integers(1, 512), st.integers(0, 3))
def test_zero_divides_what_its_stage_names(devices: int, stage: int) -> None:
    costs = of(CONFIGS[3])
    whole, shared = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    expected = costs.parameters * (whole + shared / devices)
    assert costs.training_bytes(stage, devices) == pytest.approx(expected)


def test_activations() -> None:
    costs = of(CONFIGS[3])
    assert costs.activation_bytes(2, 5) == 34 * 2 * 5 * 24 * 3
    assert costs.activation_bytes(2, 5, tensor_parallel=2) == 17 * 2 * 5 * 24 * 3
    assert costs.activation_bytes(2, 5, recompute="full") == 2 * 2 * 5 * 24 * 3


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
def test_what_cannot_be_counted_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(CONFIGS[0], **changes)


def test_a_zero_stage_beyond_three_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="stages are 0 to 3, devices 1 or more; nearest: 3 over 1"):
        of(CONFIGS[0]).training_bytes(4, 0)
