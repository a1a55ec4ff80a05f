"""Adapters that come alone are added to the weights of the model directory, the same in every engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import RawTensor
from tests.actors.vllm_model import make_model, plain_logprobs, raw_weights, save_model

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


@pytest.fixture(params=["torch", "vllm"])
def engine(request: pytest.FixtureRequest, vllm_directory: Path) -> Iterator[Any]:
    """Serves the weights of `make_model(0)`."""
    if request.param == "torch":
        yield load_engine(str(vllm_directory), EngineConfig(slots=4), version=0)
        return
    engine = request.getfixturevalue("vllm_engine")
    if engine.version != 0:
        engine.load_weights(0, raw_weights(make_model(0)))
    yield engine


def test_each_set_is_added_to_the_weights_the_engine_began_with_and_not_to_the_set_before(engine: Any) -> None:
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


def test_the_sum_is_rounded_once_to_the_type_that_is_served(tmp_path: Path) -> None:
    directory = save_model(make_model(0), tmp_path / "model")
    engine = load_engine(str(directory), EngineConfig(slots=4, dtype="bfloat16"), version=0)
    a, b = adapter(3)
    engine.load_weights(1, a_set(a, b))
    served = dict(engine._model.named_parameters())[NAME]
    assert served.equal((dict(make_model(0).named_parameters())[NAME] + b @ a).bfloat16())


A, B = adapter(1)
FLAWS: dict[str, tuple[dict[str, RawTensor], str]] = {
    "half": ({f"{NAME}.lora_A": raw(A)}, f"parameter {NAME}: got the adapter None x"),
    "of nothing": (a_set(A, B, "model.nowhere.weight"), "holds model.nowhere.weight, which adapts no parameter"),
    "mixed with whole weights": ({**a_set(A, B), NAME: raw(A)}, f"holds {NAME}, which adapts no parameter"),
    "of another rank in each half": (a_set(A, B[:, :1]), "got the adapter .*, 1.* x "),
    "of another model": (a_set(A[:, 1:], B), "publish adapters of the model the engine was started with"),
    "of a vector": (a_set(A, B, "model.norm.weight"), "parameter model.norm.weight: got"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_set_of_adapters_with_a_flaw_changes_nothing(flaw: str, tmp_path: Path) -> None:
    engine = load_engine(str(save_model(make_model(0), tmp_path / "model")), EngineConfig(slots=4), version=5)
    before = engine.probe(PROBE)
    tensors, message = FLAWS[flaw]
    with pytest.raises(WeightsError, match=message):
        engine.load_weights(6, tensors)
    assert engine.version == 5 and np.array_equal(engine.probe(PROBE), before)


def test_a_base_that_is_not_there_under_that_name_is_named_with_the_way_out(tmp_path: Path) -> None:
    directory = save_model(make_model(0), tmp_path / "model")
    engine = load_engine(str(directory), EngineConfig(slots=4), version=0)
    save_model(make_model(0).model, directory)  # the same weights without the prefix of their names
    engine = load_engine(str(directory), EngineConfig(slots=4), version=0)
    with pytest.raises(WeightsError, match=r'no tensor of that name. Set learner.lora.publish = "merged"'):
        engine.load_weights(1, a_set(A, B))
