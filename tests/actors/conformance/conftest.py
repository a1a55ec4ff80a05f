"""The engines that must conform: each is started with the weights of `make_model(0)` as version 0.

`torch` runs the pass written for Llama, `torch-generic` the model's own code; `torch-scarce` has so little memory and
computes prefixes in such small chunks that rows are sent back and filled all the time; `torch-bfloat16` computes in that
type, and is held to the same numbers in float32; `vllm` is the real one. `scripted`, the simulation's, has no model and is
held to the bookkeeping only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Engine, OnUpdate
from async_rlhf.actors.torch_engine import engine as torch_engine
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.tensors import RawTensor
from tests.actors.vllm_model import make_model, raw_weights, save_model
from tests.simulation.actor_role import FakeEngine

# Hundreds of requests, so that some still run when an update comes: vLLM is tried with `keep`, the default, and with the other
# two in `make test-all`.
_REST = (
    "[vllm-interrupt]",
    "with_finish_running_sequences_end_with_the_weights_they_began_with[vllm]",
    "a_turn_let_held_rows_go_on[vllm-finish]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.endswith(_REST):
            item.add_marker(pytest.mark.rest)


@dataclass(frozen=True)
class Subject:
    """name: which engine. start: idle, version 0. begin: what was submitted has sampled some tokens; what ended.

    tolerance: nats between its log-probabilities and those of a plain forward pass in float32. weights: a model's, as it
    takes them.
    """

    name: str
    start: Callable[[OnUpdate], Engine]
    begin: Callable[[Engine], list[Completion]]
    tolerance: float = 1e-4
    weights: Callable[[PreTrainedModel], dict[str, RawTensor]] = raw_weights

    def many(self, count: int, for_vllm: int) -> int:
        """How many requests are still being worked on after `begin`: vLLM's processes go on while this one is kept from the
        processor."""
        return for_vllm if self.name == "vllm" else count


@pytest.fixture(scope="session")
def torch_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(make_model(0), tmp_path_factory.mktemp("conformance") / "model"))


def scarce() -> TorchEngineConfig:
    """Room for two and a half sequences of 120 tokens, where six slots are."""
    config: Any = make_model(0).config
    place = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return TorchEngineConfig(slots=6, prefill_tokens=12, kv_bytes=300 * place)


# The weights of `make_model` are large: a wrong mask, row or version changes log-probabilities by several nats.
BFLOAT16_TOLERANCE = 0.4
ENGINES = ["torch", "torch-generic", "torch-scarce", pytest.param("vllm", marks=pytest.mark.filterwarnings("ignore"))]


@pytest.fixture(params=[*ENGINES, "torch-bfloat16"])
def subject(request: pytest.FixtureRequest, torch_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    yield from made(request, torch_directory, monkeypatch)


@pytest.fixture(params=ENGINES)
def exact_subject(request: pytest.FixtureRequest, torch_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """Rounds so little that another batch, or a plain pass, changes no choice."""
    yield from made(request, torch_directory, monkeypatch)


@pytest.fixture(params=[*ENGINES, "scripted"])
def any_engine(request: pytest.FixtureRequest, torch_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Also the one that has no model."""
    if request.param == "scripted":
        scripted = FakeEngine()
        scripted.load_weights(0, {})
        yield scripted
        return
    for subject in made(request, torch_directory, monkeypatch):
        yield subject.start("keep")


def made(request: pytest.FixtureRequest, torch_directory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    if request.param == "vllm":
        engine = request.getfixturevalue("vllm_engine")
        yield Subject("vllm", lambda on_update: started_vllm(engine, on_update), begin_vllm)
        engine.abort(list(engine._unfinished))
        return
    if request.param == "torch-generic":
        monkeypatch.setattr(torch_engine, "can_serve", lambda model: False)
    torch.set_num_threads(1)
    if request.param == "torch-bfloat16":
        half = TorchEngineConfig(slots=32, dtype="bfloat16")
        start, weights = partial(start_torch, torch_directory, half), partial(raw_weights, dtype="bfloat16")
        yield Subject(request.param, start, begin_torch, BFLOAT16_TOLERANCE, weights)
        return
    config = scarce() if request.param == "torch-scarce" else TorchEngineConfig(slots=32)
    yield Subject(request.param, partial(start_torch, torch_directory, config), begin_torch)


def start_torch(directory: str, config: TorchEngineConfig, on_update: OnUpdate) -> Engine:
    return load_engine(directory, config, on_update=on_update, version=0)


def started_vllm(engine: Any, on_update: OnUpdate) -> Engine:
    engine.on_update = on_update
    if engine.version != 0:
        engine.load_weights(0, raw_weights(make_model(0)))
    started: Engine = engine
    return started


def begin_torch(engine: Engine) -> list[Completion]:
    return [completion for _ in range(24) for completion in engine.step()]


def begin_vllm(engine: Engine) -> list[Completion]:
    engine.probe([5, 6])  # comes back behind a step of what was submitted before it
    return []
