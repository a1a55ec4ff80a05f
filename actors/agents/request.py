"""A request to the model, whatever the dialect. Pure.

Sampling is the trainer's: what a client sets to sample otherwise (temperature, top_p, penalties, seed, ...) is ignored. What
would be a promise about the answer that nothing here keeps (several answers, a forced tool, log-probabilities, a schema of the
text) is refused by name. What is neither is ignored.

Equal are messages with the same role, text, images and calls: names, and arguments as JSON values. Ids of calls, reasoning, and
what else a client adds do not count; another list of tools does, for the model has read it. A conversation is kept as the
digest of all that, so what is held does not grow with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.chat import chat_of
from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import named, take_none
from async_rlhf.actors.environments.settings import Message
from async_rlhf.actors.environments.tool_calls import Tool
from async_rlhf.actors.environments.yields import MAX_STOP_CHARS, MAX_STOPS, ROLES
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.buffers.errors import EpisodeError

# More than any context: what is larger says the same.
_MOST_TOKENS = 1 << 30
_SAMPLED = "the answer is what the model samples as it is trained; leave it out"


class RequestError(EpisodeError):
    """A request that has no turn for an answer. status: of HTTP."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A client's request for a turn of the model."""

    messages: list[Message]
    """The whole conversation, as the chat template reads it."""
    tools: tuple[Tool, ...] = ()
    """JSON schemas."""
    max_tokens: int | None = None
    """Limit of the turn; None: the client sets none."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn."""
    streams: bool = False
    """Whether the answer is sent as events."""
    shows_usage: bool = True
    """Whether these include its numbers of tokens."""
    trained: bool = True
    """As in `Call`."""

    @functools.cached_property
    def prefixes(self) -> list[bytes]:
        """As of `digests`."""
        return digests(self.tools, self.messages)


def conversation(given: Any, image: ReadImage = take_none) -> list[Message]:
    """Messages in the form of OpenAI's chat as the chat template reads them: roles are ours, parts of text are joined,
    arguments of calls are values, the answer of a tool has its name, and images, which `image` reads, their digests.

    Raises RequestError for what is neither text nor such an image, and for a conversation that the model cannot answer.
    """
    if not isinstance(given, list) or not given:
        raise RequestError("messages: a list of at least one message was expected")
    try:
        messages = chat_of(named([_with_content(message) for message in given], image), with_images=True)
        names: dict[Any, str] = {}
        chat = [_message(f"message {number}", message, names) for number, message in enumerate(messages, 1)]
        as_text(chat).encode()
    except ValueError as error:
        raise RequestError(str(error)) from error
    if chat[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's: the model begins its turns itself; leave it out")
    return chat


def function_tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool as the chat template is given it, whichever dialect it came in. Raises RequestError."""
    if not isinstance(name, str) or not name:
        raise RequestError(f"tools: {name!r:.60} is no name of a function; only tools that the client runs can be given")
    shown = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in shown.items() if value is not None}}


def listed(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects, empty where there is none. Raises RequestError for anything else."""
    items = body.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise RequestError(f"{name}: a list of objects was expected")
    return items


def part(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty where there is none. Raises RequestError for anything else."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}: an object was expected")
    return value


def refuse(body: Mapping[str, Any], promises: Mapping[str, Sequence[Any]]) -> None:
    """promises: names that are refused, each with the values that ask for nothing, as None always does. Raises RequestError."""
    for name, nothing in promises.items():
        if (value := body.get(name)) is not None and value not in nothing:
            raise RequestError(f"{name}={value!r:.80} cannot be kept: {_SAMPLED}")


def most_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these limits that is set. Raises RequestError."""
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise RequestError(f"{name}={value!r:.80}: a whole number of 1 or more was expected")
            return min(value, _MOST_TOKENS)
    return None


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Raises RequestError."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name}={value!r:.80}: a text was expected, or a list of texts, none of them empty")
    if len(texts) > MAX_STOPS or max(map(len, texts), default=0) > MAX_STOP_CHARS:
        raise RequestError(f"{name}: at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters are taken")
    return tuple(texts)


def _with_content(message: Any) -> Any:
    """null and no text are the same."""
    return {**message, "content": message.get("content") or ""} if isinstance(message, Mapping) else message


def _message(which: str, given: Message, names: dict[Any, str]) -> Message:
    """names: of the tools that were called so far, by the calls' ids. Raises ValueError."""
    role = "system" if given["role"] == "developer" else given["role"]
    if role not in ROLES:
        raise ValueError(f"{which} has the role {role!r}; choose one of: {', '.join(ROLES)}")
    read_message: Message = {"role": role, "content": given["content"]}
    if role == "assistant":
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            read_message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            read_message["tool_calls"] = [_call(which, call, names) for call in (calls if isinstance(calls, list) else [calls])]
    elif role == "tool":
        id = given.get("tool_call_id")
        read_message |= {"tool_call_id": id} if id else {}
        read_message |= {"name": name} if (name := given.get("name") or names.get(id)) else {}
    return read_message


def _call(which: str, given: Any, names: dict[Any, str]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        raise ValueError(f"{which} has a tool call without the name of a function; only calls of functions are read")
    id = given.get("id")
    if isinstance(id, str):
        names[id] = name
    arguments = _value(function.get("arguments"))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _value(arguments: Any) -> Any:
    """The arguments decoded from JSON; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def digests(tools: Iterable[Tool], messages: Iterable[Message]) -> list[bytes]:
    """The digest of each prefix of a conversation, shortest first. Raises ValueError for a value that is not JSON."""
    prefixes, last = [], hashlib.blake2b(_plain(list(tools)), digest_size=16).digest()
    for message in messages:
        prefixes.append(last := after(last, message))
    return prefixes


def after(before: bytes, message: Message) -> bytes:
    """The digest after a message, from its role, its content with its length, and its calls."""
    content = message.get("content") or ""
    text = (content if isinstance(content, str) else json.dumps(content)).encode(errors="surrogatepass")
    role = message["role"] if isinstance(content, str) else f"{message['role']} in parts"
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = _plain([(function["name"], _number(function["arguments"])) for function in functions]) if functions else b""
    gist = b"%s %b %d %b%b" % (before, role.encode(), len(text), text, calls)
    return hashlib.blake2b(gist, digest_size=16).digest()


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _number(value: Any) -> Any:
    """Clients in other languages write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(_number, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
