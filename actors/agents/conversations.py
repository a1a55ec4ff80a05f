"""Which of an episode's conversations a request goes on with. Pure.

A conversation is what the model has read and written behind one beginning; its tokens are never made anew from text. A request
goes on with one when its messages begin with exactly all of that one's, the model's last turn included as it was given out, and
something follows. The longest such conversation has it, of equal ones the first. Everything else (another system prompt, a
history that was compacted, a subagent, a second call beside the first) begins another: nothing is ever matched by likeness.

Equal are messages with the same role, text and calls: names, and arguments as JSON values. Ids of calls, reasoning, and what
else a client adds do not count; another list of tools does, for the model has read it. A conversation is kept as the digest of
all that, so what is held does not grow with it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Any

from async_rlhf.actors.environments.settings import Message
from async_rlhf.actors.environments.tool_calls import Tool


class Conversations:
    """Those of one episode. num_conversations: so far."""

    def __init__(self) -> None:
        self.num_conversations = 0
        self._ends: dict[bytes, list[int]] = {}  # by what they have: conversations, in order

    def place(self, prefixes: Sequence[bytes]) -> tuple[int, int]:
        """The conversation that a request is the next turn of, and how many messages that has read; a new one has read none.

        prefixes: as of `digests`. The conversation has no other turn until `wrote`.
        """
        for known in range(len(prefixes) - 1, 0, -1):
            if equal := self._ends.get(prefixes[known - 1]):
                conversation = equal.pop(0)
                if not equal:
                    del self._ends[prefixes[known - 1]]
                return conversation, known
        self.num_conversations += 1
        return self.num_conversations - 1, 0

    def wrote(self, conversation: int, prefixes: Sequence[bytes], message: Message) -> None:
        """The model's turn in answer to a request that was placed."""
        insort(self._ends.setdefault(_after(prefixes[-1], message), []), conversation)


def digests(tools: Iterable[Tool], messages: Iterable[Message]) -> list[bytes]:
    """Of each beginning of a conversation, from its first message alone to the whole. Raises ValueError for what is no JSON."""
    prefixes, last = [], hashlib.blake2b(_plain(list(tools)), digest_size=16).digest()
    for message in messages:
        prefixes.append(last := _after(last, message))
    return prefixes


def _after(before: bytes, message: Message) -> bytes:
    """Of what counts in a message: its role, its text with its length, and its calls."""
    text = (message.get("content") or "").encode(errors="surrogatepass")
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = _plain([(function["name"], _value(function["arguments"])) for function in functions]) if functions else b""
    gist = b"%s %b %d %b%b" % (before, message["role"].encode(), len(text), text, calls)
    return hashlib.blake2b(gist, digest_size=16).digest()


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _value(value: Any) -> Any:
    """Clients in other languages write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(_value, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
