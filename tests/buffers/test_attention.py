"""What a model's configuration says of its layers and of how long a text may be; and models are loaded one at a time in a
process, for transformers replaces functions of its classes while it loads."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rlhf.buffers.attention import FAMILIES, FULL, Attention, Reach, attention, max_length, probe_length
from async_rlhf.buffers.model_directory import from_pretrained
from tests.learner.making import make_model


@pytest.mark.parametrize(
    ("config", "reaches"),
    [
        ({"model_type": "llama"}, {"": FULL}),
        ({"model_type": "mistral", "sliding_window": 4096}, {"": Reach(window=4096)}),
        ({"model_type": "mistral", "sliding_window": None}, {"": FULL}),
        (
            {"model_type": "gemma2", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            {"full_attention": FULL, "sliding_attention": Reach(window=8)},
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 16, "layer_types": ["chunked_attention"]},
            {"chunked_attention": Reach(chunk=16)},
        ),
    ],
)
def test_layers_reach_as_far_as_the_configuration_says(config: dict[str, Any], reaches: dict[str, Reach]) -> None:
    found = attention(config)
    assert found is not None and found.reaches == reaches


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba"},
        {"model_type": "a-family-of-tomorrow"},
        {},
        {"model_type": "falcon", "alibi": True},
        {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
    ],
)
def test_of_layers_that_carry_a_state_and_of_unknown_families_nothing_is_assumed(config: dict[str, Any]) -> None:
    assert attention(config) is None


def test_a_model_takes_one_mask_or_one_for_each_layer_type() -> None:
    assert Attention({"": FULL}).masks(lambda reach: reach) == FULL
    reaches = {"full_attention": FULL, "sliding_attention": Reach(window=8)}
    assert Attention(reaches).masks(lambda reach: reach.window) == {"full_attention": None, "sliding_attention": 8}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"n_positions": 99, "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 8}}, 99),
        ({"max_position_embeddings": 99, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 8}, 8),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "longrope", "original_max_position_embeddings": 8}}}, 8),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    ],
)  # fmt: skip
def test_a_text_is_no_longer_than_where_its_angles_would_depend_on_others(config: dict[str, Any], limit: int | None) -> None:
    assert max_length(config) == limit


def test_a_model_is_checked_beyond_its_window_where_that_is_affordable() -> None:
    windowed = Attention({"": Reach(window=512)})
    assert probe_length(10**6, 1000, windowed, None) > 512
    assert probe_length(10**6, 1000, windowed, 300) == 300
    assert probe_length(8 * 10**9, 128_000, windowed, None) < 64
    assert probe_length(10**12, 10**6, None, None) >= 12


def test_the_documentation_lists_the_families_that_are_served() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "generation.md").read_text()
    listed = text.partition("They are, as `model_type`:")[2].partition(".\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == FAMILIES


def test_models_that_threads_load_at_once_are_whole_and_so_is_the_next_one(tmp_path: Path) -> None:
    saved = make_model("llama-tied")
    saved.save_pretrained(tmp_path)

    def load(_: int) -> PreTrainedModel:
        model: PreTrainedModel = from_pretrained(AutoModelForCausalLM, tmp_path)
        return model

    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load, range(64)))
    for model in [*loaded, make_model("llama-tied")]:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for model in loaded:
        for name, tensor in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
