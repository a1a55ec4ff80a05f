"""OpenAI's chat completions: `POST /v1/chat/completions`. Pure. The names here are the dialect's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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

_PROMISES: Mapping[str, Any] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def read(body: Mapping[str, Any], image: ReadImage = take_none) -> ChatRequest:
    refuse(body, _PROMISES)
    return ChatRequest(
        conversation(body.get("messages"), image),
        tools_of(body, [part(tool, "function") for tool in listed(body, "tools")]),
        most_tokens(body, "max_completion_tokens", "max_tokens"),
        stops(body, "stop"),
        streams=bool(body.get("stream")),
        shows_usage=bool(part(body, "stream_options").get("include_usage")),
    )


def tools_of(body: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Those that the model is shown: with `tool_choice` "none" it is shown none. Raises RequestError for one that is forced."""
    if any(tool.get("type", "function") != "function" for tool in listed(body, "tools")):
        raise RequestError("tools: only functions, which the client runs, can be given")
    if body.get("tool_choice") == "none":
        return ()
    refuse(body, {"tool_choice": ("auto",)})
    return tuple(
        function_tool(function.get("name"), function.get("description"), function.get("parameters")) for function in functions
    )


def whole(response: ChatResponse) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": response.text if response.text or not response.calls else None,
        "refusal": None,
    }
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.calls:
        message["tool_calls"] = _calls(response)
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": response.finish_reason}
    return {**_head(response, "chat.completion"), "choices": [choice], "usage": _usage(response)}


def events(request: ChatRequest, response: ChatResponse) -> bytes:
    head = _head(response, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": response.reasoning}] if response.reasoning else []
    deltas += [{"content": response.text}] if response.text else []
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(_calls(response))]
    ends: list[str | None] = [None] * len(deltas) + [response.finish_reason]
    grown = zip([*deltas, {}], ends, strict=True)
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end} for delta, end in grown]
    chunks = [{**head, "choices": [choice]} for choice in choices]
    if request.shows_usage:
        chunks.append({**head, "choices": [], "usage": _usage(response)})
    return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


def failure(status: int, reason: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}}


def _head(response: ChatResponse, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{response.id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _calls(response: ChatResponse) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}
        for call in response.calls
    ]


def _usage(response: ChatResponse) -> dict[str, Any]:
    total = response.num_prompt + response.num_tokens
    return {"prompt_tokens": response.num_prompt, "completion_tokens": response.num_tokens, "total_tokens": total}
