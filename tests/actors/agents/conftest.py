"""An endpoint with one open session; that of this process ends with the tests of a file."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from async_rlhf.actors.agents.endpoint import Endpoint, Llm, endpoint
from async_rlhf.actors.agents.sessions import Arrived, Session
from async_rlhf.actors.agents.written import Written, read_reply
from async_rlhf.actors.environments.tool_calls import TEMPLATE
from tests.actors.agents.by_hand import reply


@dataclass
class Opened:
    """arrived: the calls, in order."""

    server: Endpoint
    arrived: queue.SimpleQueue[Arrived] = field(default_factory=queue.SimpleQueue)
    session: Session = field(init=False)
    llm: Llm = field(init=False)

    def __post_init__(self) -> None:
        self.session, self.llm = self.server.open(self.arrived.put)

    def call(self) -> Arrived:
        return self.arrived.get(timeout=300)

    def write(self, call: Arrived, text: str, number: int = 1) -> Written:
        """Answer a call."""
        asked, pending = call
        found = read_reply(reply(text), asked, TEMPLATE, number, self.session.name)
        pending.answer.set_result(found)
        return found


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
