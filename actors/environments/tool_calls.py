"""What a model wrote, read as a chat message that may call tools.

The text is parsed by transformers' `parse_response` and a response template, as TRL and `transformers serve` do it. A turn that
cannot be parsed is a message without calls (`Turn.is_unparsed`), as there: it is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.environments.settings import Message
from async_rlhf.buffers.errors import ConfigError

Tool = dict[str, Any]
"""A tool as JSON schema: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""

TEMPLATE: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form of Qwen2.5, Qwen3 and Hermes."""


@dataclass(frozen=True)
class Turn:
    """message: with `tool_calls` where there are some, each `{"type": "function", "function": {"name", "arguments"}}`.
    is_unparsed: it could not be read so; its message is then the plain text."""

    message: Message
    is_unparsed: bool = False

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()


def checked(template: Any) -> Mapping[str, Any]:
    """A response template of the user's own. Raises ConfigError for one that transformers does not take."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
    except ValueError as error:
        raise ConfigError(f"environment.options.response_template: {error}") from error
    found: Mapping[str, Any] = template
    return found


def read_turn(text: str, tools: Sequence[Tool], template: Mapping[str, Any] = TEMPLATE) -> Turn:
    """What the model wrote, without its end-of-turn token. tools: those that it was shown; without any, nothing is a call."""
    plain: Message = {"role": "assistant", "content": text}
    if not tools:
        return Turn(plain)
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix="", tools=list(tools))
        for call in message.get("tool_calls") or ():
            _complete(call)
    except (TypeError, ValueError):
        return Turn(plain, is_unparsed=True)
    return Turn({**message, "content": message.get("content") or ""})


def _complete(call: Any) -> None:
    """A call without arguments has none. Raises ValueError for what is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{call!r} names no function")
    if function.get("arguments") is None:
        function["arguments"] = {}
