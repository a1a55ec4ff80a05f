"""Which of an episode's chains a request goes on with. Pure.

A chain is what the model has read and written in one conversation; its tokens are never made anew from text. A request goes on
with a chain when its messages begin with exactly all of the chain's, the model's last turn included as it was given out, and
something follows. The longest such chain has it, of equal ones the first. Everything else (another system prompt, a history
that was compacted, a subagent, a second call beside the first) begins a chain: nothing is ever matched by likeness.

Equal are messages with the same role, text and calls: names, and arguments as JSON values. Ids of calls, reasoning, and what
else a client adds do not count; another list of tools does, for the model has read it. A chain is kept as the digest of all
that, so what is held does not grow with the conversation.
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
    """The chains of one episode. num_chains: so far."""

    def __init__(self) -> None:
        self.num_chains = 0
        self._ends: dict[bytes, list[int]] = {}  # of what a chain has: the chains, in order

    def place(self, prefixes: Sequence[bytes]) -> tuple[int, int]:
        """The chain that a request is the next turn of, and how many of its messages that has read; a new one has read none.

        prefixes: as of `digests`. The chain has no other turn until `wrote`.
        """
        for known in range(len(prefixes) - 1, 0, -1):
            if chains := self._ends.get(prefixes[known - 1]):
                chain = chains.pop(0)
                if not chains:
                    del self._ends[prefixes[known - 1]]
                return chain, known
        self.num_chains += 1
        return self.num_chains - 1, 0

    def wrote(self, chain: int, prefixes: Sequence[bytes], message: Message) -> None:
        """The model's turn in answer to a request that was placed."""
        insort(self._ends.setdefault(_after(prefixes[-1], message), []), chain)


def digests(tools: Iterable[Tool], messages: Iterable[Message]) -> list[bytes]:
    """Of each beginning of a conversation, from its first message alone to the whole. Raises ValueError for what is no JSON."""
    found, last = [], hashlib.blake2b(_plain(list(tools)), digest_size=16).digest()
    for message in messages:
        found.append(last := _after(last, message))
    return found


def _after(before: bytes, message: Message) -> bytes:
    """Of what counts in a message: its role, its text with its length, and its calls."""
    text = (message.get("content") or "").encode(errors="surrogatepass")
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = _plain([(each["name"], _value(each["arguments"])) for each in functions]) if functions else b""
    gist = b"%s %b %d %b%b" % (before, message["role"].encode(), len(text), text, calls)
    return hashlib.blake2b(gist, digest_size=16).digest()


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _value(value: Any) -> Any:
    """Clients in other languages write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_value, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
