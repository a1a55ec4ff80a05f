"""A weight set, of whole parameters or of adapters alone, enters an engine whole or not at all, and the canary tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.shared import SealedPool
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import Controller, make_backend
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import SHIPPED, make_model, plain_logprobs, raw_weights, save_model

# vLLM and what it imports warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "model.layers.1.self_attn.q_proj.weight"
PROBE = tuple(range(5, 40))


def raw(tensor: torch.Tensor) -> RawTensor:
    return RawTensor("float32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())


def adapter(seed: int, rank: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [rank, columns], B [rows, rank]) for a square layer, large enough to change what is said."""
    random = torch.Generator().manual_seed(seed)
    size = make_model(0).config.hidden_size
    return torch.randn(rank, size, generator=random), 0.1 * torch.randn(size, rank, generator=random)


def a_set(a: torch.Tensor, b: torch.Tensor, name: str = NAME) -> dict[str, RawTensor]:
    return {f"{name}.lora_A": raw(a), f"{name}.lora_B": raw(b)}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_sound_set_is_adopted_to_the_last_bit_tied_parameters_once(kind: str) -> None:
    model: PreTrainedModel = own_model(kind, 0, tie_word_embeddings=True)
    engine = TorchEngine(model, slots=2)
    assert "lm_head.weight" not in dict(model.named_parameters())
    tensors = {
        name: RawTensor(raw.dtype, raw.shape, memoryview(bytes(reversed(range(256))) * len(raw.data))[: len(raw.data)])
        for name, raw in raw_weights(model).items()
    }
    engine.load_weights(9, tensors)
    assert engine.version == 9
    assert {name: raw.data for name, raw in raw_weights(model).items()} == {n: bytes(raw.data) for n, raw in tensors.items()}


def test_parameters_lie_in_a_sealed_set_and_nothing_that_comes_later_is_written_into_it(tmp_path: Path) -> None:
    save_model(make_model(0), tmp_path)
    engine = load_engine(str(tmp_path), TorchEngineConfig(slots=4), version=0)
    sealed = WeightSet.of(1, 1, raw_weights(make_model(1)), make=SealedPool().make)
    before, parameters = bytes(sealed.blob), dict(engine._model.named_parameters())
    places = {name: np.frombuffer(each.data, np.uint8).ctypes.data for name, each in sealed.tensors().items()}
    for version, tensors in enumerate((sealed.tensors(), raw_weights(make_model(2)), raw_weights(make_model(3))), start=1):
        engine.load_weights(version, tensors)
        wanted = dict(make_model(version).named_parameters())
        assert all(torch.equal(each, wanted[name]) for name, each in parameters.items())
        lie_in = {name for name, place in places.items() if parameters[name].data_ptr() == place}
        assert lie_in == ({name for name, place in places.items() if place % 64 == 0} if version == 1 else set())
    engine.load_weights(4, sealed.tensors())
    engine.load_weights(5, a_set(*adapter(1)))
    assert parameters[NAME].data_ptr() != places[NAME] and bytes(sealed.blob) == before


@pytest.fixture(params=["torch", "vllm"])
def engine(request: pytest.FixtureRequest, vllm_directory: Path) -> Iterator[Any]:
    """Serves the weights of `make_model(0)`."""
    if request.param == "torch":
        yield load_engine(str(vllm_directory), TorchEngineConfig(slots=4), version=0)
        return
    engine = request.getfixturevalue("vllm_engine")
    if engine.version != 0:
        engine.load_weights(0, raw_weights(make_model(0)))
    yield engine


def test_adapters_are_added_to_the_weights_the_engine_began_with_and_not_to_the_set_before(engine: Any) -> None:
    for version in (1, 2):
        a, b = adapter(version)
        model = make_model(0)
        with torch.no_grad():
            dict(model.named_parameters())[NAME].add_(b @ a)
        engine.load_weights(version, a_set(a, b))
        assert engine.version == version
        wanted = plain_logprobs(model, PROBE[:1], np.array(PROBE[1:], np.int32))
        plain = plain_logprobs(make_model(0), PROBE[:1], np.array(PROBE[1:], np.int32))
        assert np.abs(wanted - plain).max() > 0.01
        np.testing.assert_allclose(engine.probe(PROBE), wanted, atol=1e-4)


def test_the_sum_is_rounded_once_to_the_type_that_is_served(vllm_directory: Path) -> None:
    engine = load_engine(str(vllm_directory), TorchEngineConfig(slots=4, dtype="bfloat16"), version=0)
    a, b = adapter(3)
    engine.load_weights(1, a_set(a, b))
    served = dict(engine._model.named_parameters())[NAME]
    assert served.equal((dict(make_model(0).named_parameters())[NAME] + b @ a).bfloat16())


A, B = adapter(1)
WHOLE = raw_weights(make_model(1))
FLAWS: dict[str, tuple[dict[str, RawTensor], str]] = {
    "missing": ({name: each for name, each in WHOLE.items() if name != NAME}, f"missing: {NAME}"),
    "unknown": ({**WHOLE, "extra.weight": raw(A)}, r"unknown: extra\.weight"),
    "shape": ({**WHOLE, NAME: RawTensor("float32", (*WHOLE[NAME].shape, 1), WHOLE[NAME].data)}, f"parameter {NAME}: got"),
    "dtype": ({**WHOLE, NAME: RawTensor("int32", WHOLE[NAME].shape, WHOLE[NAME].data)}, f"parameter {NAME}: got int32"),
    "half an adapter": ({f"{NAME}.lora_A": raw(A)}, f"parameter {NAME}: got the adapter nothing x"),
    "adapter of nothing": (a_set(A, B, "model.nowhere.weight"), "holds model.nowhere.weight, which adapts no parameter"),
    "mixed with whole weights": ({**a_set(A, B), NAME: raw(A)}, f"holds {NAME}, which adapts no parameter"),
    "another rank in each half": (a_set(A, B[:, :1]), "got the adapter .*, 1.* x "),
    "adapter of another model": (a_set(A[:, 1:], B), "publish adapters of the model the engine was started with"),
    "adapter of a vector": (a_set(A, B, "model.norm.weight"), "parameter model.norm.weight: got"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_set_with_a_flaw_changes_nothing(flaw: str, vllm_directory: Path) -> None:
    engine = load_engine(str(vllm_directory), TorchEngineConfig(slots=4), version=5)
    tensors, message = FLAWS[flaw]
    with pytest.raises(WeightsError, match=message):
        engine.load_weights(6, tensors)
    assert engine.version == 5 and raw_weights(engine._model) == raw_weights(make_model(0))


def test_a_base_that_is_not_there_under_that_name_is_named_with_the_way_out(tmp_path: Path) -> None:
    model = make_model(0)
    model.config.tie_word_embeddings = True  # else the output layer would be missing
    directory = save_model(model, tmp_path / "model")
    save_model(model.model, directory)  # the same weights without the prefix of their names
    engine = load_engine(str(directory), TorchEngineConfig(slots=4), version=0)
    with pytest.raises(WeightsError, match=r'no tensor of that name. Set learner.lora.publish = "merged"'):
        engine.load_weights(1, a_set(A, B))


# The canary: after every adoption the engine must say of a fixed probe what the learner says of it.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits_they_agree_within_the_tolerance_of_the_type(dtype: Any) -> None:
    config = TorchEngineConfig(slots=2, dtype=dtype)
    backend = make_backend(SHIPPED, LearnerConfig(), LossConfig(), publish_dtype=dtype)
    engine = load_engine(str(SHIPPED), config)
    engine.load_weights(0, backend.tensors())
    canary = backend.canary()
    drift = np.abs(engine.probe(canary.ids) - np.array(canary.logprobs)).max()
    assert 0 < drift < config.canary_tolerance


def test_updates_that_rounding_swallows_are_no_difference_of_engine_and_learner() -> None:
    """Each weight moves by a fifth of its last bfloat16 digit, all of them uphill: what is served stays as it was."""
    backend = make_backend(SHIPPED, LearnerConfig(), LossConfig(), publish_dtype="bfloat16")
    assert isinstance(backend, Controller)
    model: Any = backend.machine.policy.model
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    ids = torch.arange(4, 60)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before = backend.canary(ids[0].tolist())
    for p in model.parameters():
        moved = p.data + 0.2 * torch.finfo(torch.bfloat16).eps * p.data.abs() * p.grad.sign()
        p.data = torch.where(moved.bfloat16() == p.data.bfloat16(), moved, p.data)
    assert backend.canary(ids[0].tolist()) == before
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[0]
    unrounded = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert float((unrounded - torch.tensor(before.logprobs)).abs().max()) > TorchEngineConfig(dtype="bfloat16").canary_tolerance
