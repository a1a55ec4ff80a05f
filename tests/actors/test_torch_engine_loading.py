"""From a directory to an engine: what is read, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MambaForCausalLM

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.sampling import Sampling

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(path)
    return str(path)


def test_a_saved_model_is_served_with_its_stop_token_version_and_limits(tmp_path: Path) -> None:
    engine: Engine = load_engine(save_model(tmp_path), EngineConfig(slots=8), version=4)
    assert engine.version == 4
    engine.submit([Request(RolloutKey(0, 0, n), (1, 5), 30, Sampling(), n) for n in range(32)])
    done = []
    while engine.num_unfinished:
        done.extend(engine.step())
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert all((c.token_ids[-1] == 2) == (c.finish_reason == "stop") for c in done)
    assert all(2 not in c.token_ids[:-1] for c in done)
    with pytest.raises(EngineError, match="the model holds 32"):
        engine.submit([Request(RolloutKey(1, 0, 0), (1, 5), 31, Sampling(), 0)])


def test_every_end_token_of_the_generation_config_stops(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(range(1, 16))}))
    engine = load_engine(directory, EngineConfig(slots=4))
    engine.submit([Request(RolloutKey(0, 0, n), (1,), 30, Sampling(), n) for n in range(4)])
    steps = 0
    while engine.num_unfinished:
        assert all(c.token_ids[-1] != 0 or c.finish_reason == "length" for c in engine.step())
        steps += 1
    assert steps < 10


def test_the_weights_have_the_type_asked_for(tmp_path: Path) -> None:
    engine = load_engine(save_model(tmp_path), EngineConfig(slots=2, dtype="bfloat16"))
    engine.submit([Request(RolloutKey(0, 0, 0), (1, 4, 5), 8, Sampling(), 0)])
    done = []
    while engine.num_unfinished:
        done.extend(engine.step())
    assert done[0].logprobs.dtype == "float32"


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_engine(str(tmp_path), EngineConfig())
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ConfigError, match="no causal language model"):
        load_engine(str(tmp_path), EngineConfig())


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device = 'warp:9'"):
        load_engine(save_model(tmp_path), EngineConfig(device="warp:9"))


def test_a_model_with_another_memory_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=32)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model type 'mamba'.*Set engine\.kind = 'vllm'"):
        load_engine(str(tmp_path), EngineConfig())


def test_graphs_without_a_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs = true with engine\.device = 'cpu'"):
        load_engine(save_model(tmp_path), EngineConfig(cuda_graphs=True))
