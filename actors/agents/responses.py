"""OpenAI's responses: `POST /v1/responses`. Pure. The names here are the dialect's.

No response is kept: `previous_response_id` and what else names one is refused, and a client sends its whole input, as OpenAI's
agents do by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from async_rlhf.actors.agents import chat
from async_rlhf.actors.agents.request import ChatRequest, RequestError, conversation, listed, most_tokens, part, refuse
from async_rlhf.actors.agents.response import MODEL, ChatResponse, event
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import take_none
from async_rlhf.actors.environments.settings import Message

_KEPT: Mapping[str, Any] = {"previous_response_id": (), "conversation": (), "prompt": (), "background": (False,)}
_PROMISES: Mapping[str, Any] = {"top_logprobs": (0,), "parallel_tool_calls": (True,)}


def read(body: Mapping[str, Any], image: ReadImage = take_none) -> ChatRequest:
    for name, nothing in _KEPT.items():
        if (value := body.get(name)) is not None and value not in nothing:
            raise RequestError(f"{name}: nothing is kept between requests here; send the whole input")
    refuse(body, _PROMISES)
    refuse({"text.format": part(body, "text").get("format")}, {"text.format": ({"type": "text"},)})
    given = body.get("input")
    items = listed({"input": [{"role": "user", "content": given}]} if isinstance(given, str) else body, "input")
    system: list[Message] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return ChatRequest(
        conversation([*system, *_messages(items)], image),
        chat.tools_of(body, listed(body, "tools")),
        most_tokens(body, "max_output_tokens"),
        streams=bool(body.get("stream")),
    )


def whole(response: ChatResponse) -> dict[str, Any]:
    is_cut = response.finish_reason == "length"
    return {
        **_begun(response),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(response),
        "usage": {
            "input_tokens": response.num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": response.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.num_prompt + response.num_tokens,
        },
    }


def events(request: ChatRequest, response: ChatResponse) -> bytes:
    begun, whole_response = _begun(response), whole(response)
    parts: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    parts.append({"type": "response.in_progress", "response": begun})
    for index, item in enumerate(whole_response["output"]):
        parts += ({**part, "output_index": index} for part in _growth(item))
    parts.append({"type": f"response.{whole_response['status']}", "response": whole_response})
    return b"".join(event({**part, "sequence_number": at}, part["type"]) for at, part in enumerate(parts))


failure = chat.failure


def _messages(items: list[Mapping[str, Any]]) -> Iterator[Message]:
    """In the form of a chat: reasoning, a message and the calls behind it are one turn of the assistant's."""
    turn: Message = {}
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn = {"role": "assistant", **turn, "tool_calls": [*turn.get("tool_calls", ()), call]}
            continue
        # Only calls go on with a turn that has text or calls already.
        if turn.keys() & {"content", "tool_calls"}:
            yield turn
            turn = {}
        if kind == "reasoning":
            texts = (part.get("text") or "" for part in [*listed(item, "content"), *listed(item, "summary")])
            turn = {"reasoning_content": "".join(map(str, texts))}
        elif kind == "message" and item.get("role") == "assistant":
            turn = {"role": "assistant", **turn, "content": item.get("content")}
        else:
            turn = {}
            yield _other(kind, item)
    if turn.keys() & {"content", "tool_calls"}:
        yield turn


def _other(kind: str, item: Mapping[str, Any]) -> Message:
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise RequestError(f"input: items of type {kind!r:.60} are not read; messages, reasoning and function calls are")


def _begun(response: ChatResponse) -> dict[str, Any]:
    return {
        "id": f"resp_{response.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _items(response: ChatResponse) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if response.reasoning:
        content = [{"type": "reasoning_text", "text": response.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{response.id}", "summary": [], "content": content})
    if response.text or not response.calls:
        text = {"type": "output_text", "text": response.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{response.id}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": [text]})
    for call in response.calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments_text, "status": "completed"}
        items.append({"type": "function_call", "id": f"fc_{call.id}", **named})
    return items


def _growth(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an item of the output, but for its place there."""
    where = {"item_id": item["id"]}
    begun = {**item, "status": "in_progress"} if "status" in item else {**item}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": {**begun, "arguments": ""}}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
        yield {
            "type": "response.function_call_arguments.done",
            **where,
            "name": item["name"],
            "arguments": item["arguments"],
        }
    else:
        (part,) = item["content"]
        where["content_index"] = 0
        name = part["type"]
        yield {"type": "response.output_item.added", "item": {**begun, "content": []}}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        yield {"type": f"response.{name}.delta", **where, "delta": part["text"], "logprobs": []}
        yield {"type": f"response.{name}.done", **where, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "item": item}
