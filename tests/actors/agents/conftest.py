"""An endpoint with one open session; that of this process ends with the tests of a file."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from async_rlhf.actors.agents.endpoint import Endpoint, Llm, endpoint
from async_rlhf.actors.agents.response import ChatResponse, read_reply
from async_rlhf.actors.agents.sessions import AgentSession, IncomingCall
from async_rlhf.actors.environments.tool_calls import TEMPLATE
from tests.actors.agents.by_hand import reply


@dataclass
class Opened:
    """calls: in order."""

    server: Endpoint
    calls: queue.SimpleQueue[IncomingCall] = field(default_factory=queue.SimpleQueue)
    session: AgentSession = field(init=False)
    llm: Llm = field(init=False)

    def __post_init__(self) -> None:
        self.session, self.llm = self.server.open(self.calls.put)

    def call(self) -> IncomingCall:
        return self.calls.get(timeout=300)

    def write(self, call: IncomingCall, text: str, number: int = 1) -> ChatResponse:
        """Answer a call."""
        response = read_reply(reply(text), call.request, TEMPLATE, number, self.session.name)
        call.pending.answer.set_result(response)
        return response


@pytest.fixture
def opened() -> Iterator[Opened]:
    server = Endpoint()
    yield Opened(server)
    server.close()


@pytest.fixture(autouse=True, scope="module")
def ended_endpoint() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environ:
        for name in ("NO_PROXY", "no_proxy"):
            environ.setenv(name, "example.org")  # what an endpoint adds to is put back
        yield
        if endpoint.cache_info().currsize:
            endpoint().close()
            endpoint.cache_clear()
