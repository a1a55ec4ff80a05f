"""A model's text, parsed as a chat message that may call tools.

The text is parsed by transformers' `parse_response` and a response template, as TRL and `transformers serve` do it. A turn that
cannot be parsed is a message without calls (`ParsedTurn.is_unparsed`), as there: it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class ToolCall(NamedTuple):
    """arguments: by name, as the model wrote them."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """A model's turn as a chat message."""

    message: Message
    """With `tool_calls` where there are some, each `{"type": "function", "function": {"name", "arguments"}}`."""
    is_unparsed: bool = False
    """Whether parsing failed; the message is then the plain text."""

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


def schema_of(tool: Callable[..., Any] | Mapping[str, Any]) -> Tool:
    """A function as the model's chat template is given it; a schema as it is. Raises ConfigError."""
    if isinstance(tool, Mapping):
        if not isinstance(tool.get("function"), Mapping) or not isinstance(tool["function"].get("name"), str):
            raise ConfigError(f"the tool {str(dict(tool))[:100]} has no function with a name; a JSON schema of a tool has one")
        return dict(tool)
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        schema: Tool = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"tool {tool.__name__!r} cannot be described to the model: {error}; it needs type hints and a Google-style "
            "docstring that names each argument"
        ) from error
    return schema


def tool_calls(text: str) -> list[ToolCall] | None:
    """The calls in what the model wrote, for an environment of one's own: in the form of `TEMPLATE`, in order.

    None where what begins as a call cannot be read; an environment that does not ask for the difference takes it for a turn
    without calls. Whether there is a tool of that name, and whether it takes these arguments, is left to the environment.
    """
    turn = parsed(text, (), TEMPLATE)
    if turn.is_unparsed:
        return None
    calls = [ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in turn.calls]
    return calls if all(isinstance(call.arguments, dict) for call in calls) else None


def read_turn(text: str, tools: Sequence[Tool], template: Mapping[str, Any] = TEMPLATE) -> ParsedTurn:
    """The turn of a text without its end-of-turn token. tools: those that it was shown; without any, nothing is a call."""
    return parsed(text, tools, template) if tools else ParsedTurn({"role": "assistant", "content": text})


def parsed(text: str, tools: Sequence[Tool], template: Mapping[str, Any]) -> ParsedTurn:
    """The same, whatever the model was shown."""
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix="", tools=list(tools))
        for call in message.get("tool_calls") or ():
            _complete(call)
    except (TypeError, ValueError):
        return ParsedTurn({"role": "assistant", "content": text}, is_unparsed=True)
    return ParsedTurn({**message, "content": message.get("content") or ""})


def _complete(call: Any) -> None:
    """A call without arguments has none. Raises ValueError for what is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{call!r} names no function")
    if function.get("arguments") is None:
        function["arguments"] = {}
