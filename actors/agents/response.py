"""The model's turn in answer to a request, whatever the dialect. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from async_rlhf.actors.agents.request import ChatRequest
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import take_none
from async_rlhf.actors.environments.settings import Message, Reply
from async_rlhf.actors.environments.tool_calls import ParsedTurn, parsed

MODEL = "policy"
"""What the model is called; requests may call it otherwise."""


class WrittenToolCall(NamedTuple):
    """arguments: by name."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_text(self) -> str:
        return json.dumps(self.arguments)


@dataclass(frozen=True)
class ChatResponse:
    """The model's turn, as a client gets it."""

    id: str
    """Unique among all turns of all sessions."""
    text: str
    reasoning: str
    calls: tuple[WrittenToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    """The client's text that ended the turn; `text` is without it."""
    num_prompt: int
    """Tokens before the turn in its conversation."""
    num_tokens: int
    """Tokens of the turn."""
    is_unparsed: bool = False
    """Whether the beginning of a call could not be parsed, and is text."""

    @property
    def message(self) -> Message:
        """As a client has it, who may leave out the reasoning."""
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in self.calls]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


class Dialect(Protocol):
    """A module is one."""

    def read(self, body: Mapping[str, Any], image: ReadImage = take_none) -> ChatRequest:
        """image: reads those in messages. Raises RequestError."""

    def whole(self, response: ChatResponse) -> dict[str, Any]:
        """The answer as JSON data."""

    def events(self, request: ChatRequest, response: ChatResponse) -> bytes:
        """The answer as server-sent events, all of them: a turn is given when it is whole."""

    def failure(self, status: int, reason: str) -> dict[str, Any]:
        """An error as JSON data."""


def read_reply(reply: Reply, request: ChatRequest, template: Mapping[str, Any], number: int, session: str) -> ChatResponse:
    """template: how the model writes reasoning and calls. number: of the turn in its session, from 1. session: its name."""
    text, stopped_by = _cut(reply.text, request.stop)
    turn = _turn(text, request, template)
    calls = tuple(
        # Nine letters and digits, which Mistral's templates ask for.
        WrittenToolCall(f"call{number:03}{at:02}", call["function"]["name"], call["function"]["arguments"])
        for at, call in enumerate(turn.calls)
    )
    whole: Literal["stop", "tool_calls"] = "tool_calls" if calls else "stop"
    return ChatResponse(
        id=f"turn_{number}_{session}",
        text=turn.message["content"],
        reasoning=turn.message.get("reasoning_content") or "",
        calls=calls,
        finish_reason="length" if reply.finish_reason == "length" else whole,
        stopped_by=stopped_by,
        num_prompt=reply.num_prompt,
        num_tokens=reply.num_tokens,
        is_unparsed=turn.is_unparsed,
    )


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first of these, and which that is; of two in one place the longer."""
    cuts = [(at, -len(stop_text), stop_text) for stop_text in stop if (at := text.find(stop_text)) >= 0]
    if not cuts:
        return text, None
    at, _, first = min(cuts)
    return text[:at], first


def _turn(text: str, request: ChatRequest, template: Mapping[str, Any]) -> ParsedTurn:
    """A call whose arguments a client could not be given as JSON cannot be read. What has neither calls nor reasoning stays as
    it was written."""
    if not request.tools:
        template = {**template, "fields": {name: field for name, field in template["fields"].items() if name != "tool_calls"}}
    turn = parsed(text, request.tools, template)
    try:
        for call in turn.calls:
            json.dumps(call["function"]["arguments"], allow_nan=False)
            if not isinstance(call["function"]["arguments"], dict):
                raise ValueError("arguments have names")
    except ValueError:
        return ParsedTurn({"role": "assistant", "content": text}, is_unparsed=True)
    is_plain = not turn.calls and not turn.message.get("reasoning_content")
    return ParsedTurn({"role": "assistant", "content": text}, turn.is_unparsed) if is_plain else turn
