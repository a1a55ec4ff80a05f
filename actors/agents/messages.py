"""Anthropic's messages: `POST /v1/messages`. Pure. The names here are the dialect's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from async_rlhf.actors.agents.request import (
    ChatRequest,
    RequestError,
    conversation,
    function_tool,
    listed,
    most_tokens,
    part,
    refuse,
    stops,
)
from async_rlhf.actors.agents.response import MODEL, ChatResponse, event
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import take_none
from async_rlhf.actors.environments.settings import Message
from async_rlhf.actors.environments.tool_calls import Tool

_PROMISES: Mapping[str, Any] = {"output_format": (), "mcp_servers": ([],), "container": ()}
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Mapping[str, Any], image: ReadImage = take_none) -> ChatRequest:
    refuse(body, _PROMISES)
    system: list[Message] = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    said = [message for turn in listed(body, "messages") for message in _messages(turn)]
    return ChatRequest(
        conversation([*system, *said], image),
        _tools(body),
        most_tokens(body, "max_tokens"),
        stops(body, "stop_sequences"),
        streams=bool(body.get("stream")),
    )


def whole(response: ChatResponse) -> dict[str, Any]:
    return {
        "id": f"msg_{response.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(response),
        **_end(response),
        "usage": {"input_tokens": response.num_prompt, "output_tokens": response.num_tokens},
    }


def events(request: ChatRequest, response: ChatResponse) -> bytes:
    message = whole(response)
    usage = {"input_tokens": response.num_prompt, "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    parts: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty, delta = _grown(block)
        parts.append({"type": "content_block_start", "index": index, "content_block": empty})
        parts.append({"type": "content_block_delta", "index": index, "delta": delta})
        parts.append({"type": "content_block_stop", "index": index})
    parts.append({"type": "message_delta", "delta": _end(response), "usage": {"output_tokens": response.num_tokens}})
    parts.append({"type": "message_stop"})
    return b"".join(event(part, part["type"]) for part in parts)


def failure(status: int, reason: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": reason}}


def _messages(given: Mapping[str, Any]) -> Iterable[Message]:
    """In the form of a chat: answers of tools are messages of their own, in their places among the user's text."""
    blocks, texts = given.get("content"), list[Any]()
    if not isinstance(blocks, list):
        yield {"role": given.get("role"), "content": blocks}
        return
    calls, thoughts = list[dict[str, Any]](), list[str]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            if texts:
                yield {"role": given.get("role"), "content": texts}
                texts = []
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking") or ""))
        else:
            texts.append(block)
    if given.get("role") == "assistant":
        yield {"role": "assistant", "content": texts, "reasoning_content": "".join(thoughts) or None, "tool_calls": calls}
    elif texts or not blocks:
        yield {"role": given.get("role"), "content": texts}


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Those that the model is shown: with `tool_choice` "none" it is shown none. Raises RequestError for one that is forced."""
    given = listed(body, "tools")
    if others := [tool.get("type") for tool in given if tool.get("type", "custom") != "custom"]:
        raise RequestError(f"tools: {others[0]!r:.60} is run by Anthropic; only tools that the client runs can be given")
    if part(body, "tool_choice").get("type") == "none":
        return ()
    refuse(body, {"tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False})})
    return tuple(function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")) for tool in given)


def _blocks(response: ChatResponse) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if response.reasoning:
        blocks.append({"type": "thinking", "thinking": response.reasoning, "signature": ""})
    if response.text or not response.calls:
        blocks.append({"type": "text", "text": response.text})
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in response.calls]


def _grown(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as it begins, and what it grows by."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    key = block["type"]
    return {**block, key: ""}, {"type": f"{key}_delta", key: block[key]}


def _end(response: ChatResponse) -> dict[str, Any]:
    reason = "stop_sequence" if response.stopped_by and response.finish_reason == "stop" else _ENDS[response.finish_reason]
    return {"stop_reason": reason, "stop_sequence": response.stopped_by}
