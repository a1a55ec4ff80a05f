"""A vLLM that dies, hangs or lacks version labels: scripted, because the real one cannot be made to on demand."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.vllm_engine.arguments import Capabilities
from async_rlhf.actors.vllm_engine.session import Session
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

NOTHING_NEW = Capabilities(names_versions=False, flat_logprobs=False)


class ScriptedLLM:
    """One token a request, when `go` is set. `hangs`: what it is told to do waits for ever. `dies`: generation raises."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=100)
        self.errored = self.hangs = self.dies = False
        self.go = asyncio.Event()
        self.order: list[str] = []
        self.salts: list[str] = []

    async def generate(self, prompt: dict[str, Any], params: Any, name: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        await self.go.wait()
        if self.dies:
            raise RuntimeError("the core is gone")
        output = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}], finish_reason="length")
        yield SimpleNamespace(outputs=[output])

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.order.append(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        self.order.append(f"{method} {args[0]}")
        if self.hangs:
            await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        self.order.append("resume")
        self.go.set()

    def shutdown(self, timeout: float) -> None:
        self.order.append("shutdown")


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(slots=2, stop_ids=[1])
    yield session
    session.close()


def started(session: Session) -> ScriptedLLM:
    llm: list[ScriptedLLM] = []

    def make() -> ScriptedLLM:
        llm.append(ScriptedLLM())
        return llm[0]

    assert session.start(make, NOTHING_NEW, version=3) == 100
    return llm[0]


def requests(count: int) -> list[Request]:
    return [Request(RolloutKey(n, 0, 0), (7,), 1, Sampling(), n) for n in range(count)]


def taken(session: Session, count: int) -> list[Any]:
    done: list[Any] = []
    while len(done) < count:
        done += session.take(5.0)
    return sorted(done, key=lambda completion: completion.key)


def test_weights_enter_between_a_pause_that_keeps_and_a_resume(session: Session) -> None:
    llm = started(session)
    session.adopt(4, "w", recompute=False)
    session.adopt(5, "v", recompute=True)
    first, second = llm.order[:3], llm.order[3:]
    assert first == ["pause keep False", "receive_weights w", "resume"]
    assert second == ["pause keep True", "receive_weights v", "resume"]


def test_without_labels_a_token_counts_as_the_version_at_admission(session: Session) -> None:
    llm = started(session)
    session.submit(requests(3))  # the third waits for a slot
    session.adopt(4, "w", recompute=False)
    assert [completion.spans for completion in taken(session, 3)] == [(Span(3, 1),), (Span(3, 1),), (Span(4, 1),)]
    assert llm.salts == ["adoption-1", "adoption-1", "adoption-2"]


def test_a_call_that_a_dying_vllm_leaves_unanswered_ends_with_its_name(session: Session) -> None:
    llm = started(session)
    llm.hangs = llm.errored = True
    with pytest.raises(EngineError, match="vLLM's processes have ended"):
        session.adopt(4, "w", recompute=False)


def test_what_ends_a_running_request_ends_the_engine(session: Session) -> None:
    llm = started(session)
    llm.dies = True
    session.submit(requests(1))
    with pytest.raises(EngineError, match="vLLM failed: RuntimeError: the core is gone"):
        session.adopt(4, "w", recompute=False)
        session.take(5.0)


def test_nothing_more_is_admitted_while_it_holds(session: Session) -> None:
    llm = started(session)
    session.submit(requests(2))
    assert session.hold() == 2
    session.submit(requests(4)[2:])
    assert len(llm.salts) == 2
    session.adopt(4, "w", recompute=False)
    assert [completion.spans[0].version for completion in taken(session, 4)] == [3, 3, 4, 4]


def test_arguments_that_vllm_refuses_are_a_wrong_setting(session: Session) -> None:
    def make() -> Any:
        raise ValueError("max_model_len is too large")

    with pytest.raises(ConfigError, match="max_model_len is too large"):
        session.start(make, NOTHING_NEW, version=0)
