"""A weight set is adopted whole or not at all."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import RawTensor

CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


def raw_weights(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor("float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("flaw", ["missing", "unknown", "shape", "dtype"])
def test_a_weight_set_with_a_flaw_changes_nothing(model: PreTrainedModel, flaw: str) -> None:
    engine = TorchEngine(model, slots=2, version=5)
    before = raw_weights(model)
    bad = {name: RawTensor("float32", raw.shape, bytes(len(raw.data))) for name, raw in before.items()}
    name = list(bad)[-1]
    raw = bad[name]
    if flaw == "missing":
        del bad[name]
    elif flaw == "unknown":
        bad["extra.weight"] = raw
    elif flaw == "shape":
        bad[name] = RawTensor("float32", (*raw.shape, 1), raw.data)
    else:
        bad[name] = RawTensor("int32", raw.shape, raw.data)
    with pytest.raises(WeightsError, match=r"extra\.weight" if flaw == "unknown" else name):
        engine.load_weights(6, bad)
    assert engine.version == 5
    assert raw_weights(model) == before


def test_a_sound_weight_set_is_adopted_to_the_last_bit_tied_parameters_once(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=2)
    assert "lm_head.weight" not in dict(model.named_parameters())
    tensors = {
        name: RawTensor(raw.dtype, raw.shape, memoryview(bytes(reversed(range(256))) * len(raw.data))[: len(raw.data)])
        for name, raw in raw_weights(model).items()
    }
    engine.load_weights(9, tensors)
    assert engine.version == 9
    assert {name: raw.data for name, raw in raw_weights(model).items()} == {n: bytes(raw.data) for n, raw in tensors.items()}
