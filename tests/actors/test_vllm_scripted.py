"""A vLLM that dies, hangs or is of another release: scripted, because the real one cannot be made to on demand."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.vllm_engine.engine import VLLMEngine
from async_rlhf.actors.vllm_engine.loading import load_engine
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.sampling import Sampling
from tests.actors.vllm_model import SHIPPED

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class ScriptedLLM:
    """One token a request, when `go` is set. `hangs`: what it is told to do waits for ever. `dies`: generation raises."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=100)
        self.errored = self.hangs = self.dies = False
        self.go = asyncio.Event()
        self.order: list[str] = []
        self.salts: list[str] = []
        self.version = ""

    async def generate(self, prompt: dict[str, Any], params: Any, name: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        await self.go.wait()
        if self.dies:
            raise RuntimeError("the core is gone")
        flat = SimpleNamespace(token_ids=[5], logprobs=[-1.0], start_indices=[0], end_indices=[1])
        labels = [SimpleNamespace(version=self.version, start=0, end=1)]
        ended = SimpleNamespace(
            token_ids=[5], logprobs=flat, finish_reason="length", weight_versions=labels, sampling_mask=None
        )
        yield SimpleNamespace(outputs=[ended])

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.order.append(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        self.order.append(method)
        if self.hangs:
            await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        self.order.append("resume")
        self.go.set()

    def shutdown(self, timeout: float) -> None:
        self.order.append("shutdown")


class NoModel(torch.nn.Module):
    config = None

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(num_embeddings=9)


@pytest.fixture
def engine() -> Iterator[VLLMEngine]:
    engine = VLLMEngine(ScriptedLLM, cast(Any, NoModel()), slots=2, stop_ids=[1], has_tokenizer=False, version=3)
    yield engine
    engine.close()


def requests(count: int) -> list[Request]:
    return [Request(RolloutKey(n, 0, 0), (7,), 1, Sampling(), n) for n in range(count)]


def ended(engine: VLLMEngine) -> list[tuple[int | None, int | None]]:
    """(version, cache_version) of each completion, in the order of the keys."""
    done: list[Completion] = []
    while engine.num_unfinished:
        done += engine.step()
    return [(span.version, span.cache_version) for each in sorted(done, key=lambda each: each.key) for span in each.spans]


def test_weights_enter_between_a_pause_that_keeps_and_a_resume(engine: VLLMEngine) -> None:
    engine.load_weights(4, {})
    engine.on_update = "interrupt"
    engine.load_weights(5, {})
    assert engine._llm.order[:3] == ["pause keep False", "receive_weights", "resume"]
    assert engine._llm.order[3:] == ["pause keep True", "receive_weights", "resume"] and engine.version == 5


def test_a_request_names_the_weights_at_its_admission_as_its_cache_and_shares_no_prefix_with_others(engine: VLLMEngine) -> None:
    engine.submit(requests(3))  # the third waits for a slot
    engine.load_weights(4, {})
    assert ended(engine) == [(4, 3), (4, 3), (4, None)]
    assert engine._llm.salts == ["adoption-1", "adoption-1", "adoption-2"]


def test_with_finish_nothing_more_is_admitted_until_the_weights_have_come(engine: VLLMEngine) -> None:
    engine.on_update = "finish"
    engine.submit(requests(2))
    engine.load_weights(4, {})
    engine.submit(requests(4)[2:])
    assert len(engine._llm.salts) == 2 and engine.version == 3
    engine._loop.call_soon_threadsafe(engine._llm.go.set)
    assert ended(engine) == [(3, None), (3, None), (4, None), (4, None)]


def test_a_call_that_a_dying_vllm_leaves_unanswered_ends_with_its_name(engine: VLLMEngine) -> None:
    engine._llm.hangs = engine._llm.errored = True
    with pytest.raises(EngineError, match="vLLM's processes have ended"):
        engine.load_weights(4, {})


def test_what_ends_a_running_request_ends_the_engine(engine: VLLMEngine) -> None:
    engine._llm.dies = True
    engine.submit(requests(1))
    with pytest.raises(EngineError, match="vLLM failed: RuntimeError: the core is gone"):
        engine.load_weights(4, {})
        engine.step()


def test_arguments_that_vllm_refuses_and_another_release_are_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        raise ValueError("max_model_len is too large")

    with pytest.raises(ConfigError, match="max_model_len is too large"):
        VLLMEngine(make, cast(Any, NoModel()), slots=2, stop_ids=[1], has_tokenizer=False)
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.31\.2 is installed, 0\.32\.\* or 0\.33\.\* is needed \(.*\); install the extra"
    ):
        load_engine(str(SHIPPED), VLLMEngineConfig(kind="vllm"))
