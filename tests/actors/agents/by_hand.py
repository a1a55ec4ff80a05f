"""An agent's generator, driven by hand with a scripted model; and plain requests to its endpoint."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.agents.adapter import from_function
from async_rlhf.actors.agents.endpoint import Llm
from async_rlhf.actors.environments.settings import Call, Reply, Scores
from async_rlhf.actors.rewards.signature import Signature
from async_rlhf.buffers.score import Score

Model = Callable[[Call, int], str | Reply]
"""Of a call and its number, from 1, the model's turn."""


@dataclass(frozen=True)
class Played:
    calls: list[Call]
    score: Score
    turn_scores: tuple[float | None, ...]

    @property
    def conversations(self) -> list[int]:
        return [call.conversation for call in self.calls]


def echo(call: Call, number: int) -> str:
    return f"{number}: {call.messages[-1]['content']}"


def generator_of(solve: Callable[..., Any], options: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    options = options or {}
    return from_function("agent", solve, Signature.of(solve), options).function(**{**fields, **options})


def play(solve: Callable[..., Any], model: Model = echo, options: Mapping[str, Any] | None = None, **fields: Any) -> Played:
    """One episode to its end."""
    generator = generator_of(solve, options, **fields)
    return asyncio.run(driven(generator, model))


async def driven(generator: Any, model: Model) -> Played:
    """One call after the other."""
    calls: list[Call] = []
    sent: Reply | None = None
    while True:
        yielded = (
            await generator.asend(sent) if inspect.isasyncgen(generator) else await asyncio.to_thread(generator.send, sent)
        )
        if isinstance(yielded, Scores):
            return Played(calls, yielded.score, yielded.turns)
        assert yielded.call is not None
        calls.append(yielded.call)
        sent = reply(model(yielded.call, len(calls)), yielded.call.conversation)


def reply(text: str | Reply, conversation: int = 0) -> Reply:
    return text if isinstance(text, Reply) else Reply(text, "stop", 5, 7, conversation)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@contextmanager
def asked(llm: Llm, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Iterator[http.client.HTTPConnection]:
    """A request that was sent whole, by key; its connection is closed with the block."""
    with connection(llm) as open:
        sent = body if isinstance(body, bytes | Iterator) else json.dumps(body)
        given = {"authorization": f"Bearer {llm.api_key}"} | {name.replace("_", "-"): each for name, each in headers.items()}
        open.request("POST", path, sent, given)
        yield open


@contextmanager
def connection(llm: Llm) -> Iterator[http.client.HTTPConnection]:
    open = http.client.HTTPConnection(llm.origin.partition("://")[2], timeout=300)
    try:
        yield open
    finally:
        open.close()


def answer(open: http.client.HTTPConnection) -> Answer:
    got = open.getresponse()
    return Answer(got.status, {name.lower(): each for name, each in got.getheaders()}, got.read().decode())


def post(llm: Llm, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Answer:
    with asked(llm, body, path, **headers) as open:
        return answer(open)


def said(*texts: str, **more: Any) -> dict[str, Any]:
    """The body of a chat whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], **more}
