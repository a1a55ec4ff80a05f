"""A weight set is adopted whole or not at all."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import RawTensor
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import raw_weights


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return own_model(request.param, 0, tie_word_embeddings=True)


@pytest.mark.parametrize("flaw", ["missing", "unknown", "shape", "dtype"])
def test_a_weight_set_with_a_flaw_changes_nothing(model: PreTrainedModel, flaw: str) -> None:
    engine = TorchEngine(model, slots=2, version=5)
    before = raw_weights(model)
    bad = {name: RawTensor("float32", raw.shape, bytes(len(raw.data))) for name, raw in before.items()}
    name = list(bad)[-1]
    raw = bad.pop(name)
    changed = {
        "missing": {},
        "unknown": {name: raw, "extra.weight": raw},
        "shape": {name: RawTensor("float32", (*raw.shape, 1), raw.data)},
        "dtype": {name: RawTensor("int32", raw.shape, raw.data)},
    }
    with pytest.raises(WeightsError, match=r"extra\.weight" if flaw == "unknown" else name):
        engine.load_weights(6, bad | changed[flaw])
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
