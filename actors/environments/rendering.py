"""How the turns of an episode become tokens. Pure, given a tokenizer.

    text    the first yield as prompts are; an observation is the tokens of its text
    chat    the first yield through the model's chat template; an observation is the template's *delta* (`chat_template`)

An episode is chat where `data.chat` is set or its first yield is messages. In it, text stands for one user message.

What an environment says may look like a special token (`<|im_end|>` on a page of the web). transformers, vLLM and SGLang let it
become one by default; an observation of ours never does: such a content is encoded apart from the template's own text, split
into ordinary tokens, and refused where that is impossible. Added tokens that are not marked special (`<think>` of some
tokenizers) and prompts are encoded as they are everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from async_rlhf.actors.environments.chat_template import delta_of, probe, probe_tools
from async_rlhf.actors.environments.settings import Content, Message
from async_rlhf.actors.environments.tool_calls import Tool
from async_rlhf.buffers.errors import ConfigError, EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendered(NamedTuple):
    """What the model reads, as text and as token ids."""

    text: str
    ids: list[int]


class Renderer:
    """Turns yields into tokens. chat: text is given as a user message. render: as `EnvironmentConfig.render`. tools: those that
    the template is given, as JSON schemas."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool,
        render: Literal["conversation", "by_message"] = "conversation",
        tools: Sequence[Tool] = (),
    ) -> None:
        self._tokenizer, self._chat, self._by_message = tokenizer, chat, render == "by_message"
        self._tools = list(tools) or None  # For some templates an empty list is not the same as none.
        added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {**dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)), **added}
        longest_first = sorted(filter(None, self._special.values()), key=len, reverse=True)
        self._looks_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def check(self) -> None:
        """Before a run with `data.chat` or tools: raises ConfigError for a template that cannot take observations."""
        if self._chat or self._tools:
            self._probed  # noqa: B018  it raises

    def is_chat(self, prompt: Content) -> bool:
        """Whether an episode with this first yield goes through the chat template."""
        return self._chat or not isinstance(prompt, str)

    def prompt(self, content: Content) -> Rendered:
        """The first yield, with the model's turn begun.

        Raises ConfigError as `check` does, EpisodeError for messages that the template refuses and for a prompt without tokens.
        """
        if not self.is_chat(content):
            assert isinstance(content, str)
            text, ids = content, self._encode(content, adds_special=True)
        else:
            self._probed  # noqa: B018  it raises
            try:
                text = self._apply(as_messages(content), True)
            except Exception as error:  # the template is the model's own code
                raise EpisodeError(f"the chat template refuses the prompt: {error}") from error
            ids = self._encode(text)
        if not ids:
            raise EpisodeError("the prompt has no tokens; yield what the model is to answer")
        return Rendered(text, ids)

    def observation(self, prompt: Content, content: Content, reply_ids: Sequence[int]) -> Rendered:
        """What follows the tokens that the model sampled in its turn (`reply_ids`).

        prompt: the episode's first yield. In a chat, an end-of-turn token that the model has written is not repeated; a turn
        that was cut off gets one.
        Raises EpisodeError for what the template refuses or leaves out, and for messages in an episode that began as text.
        """
        if not self.is_chat(prompt):
            if not isinstance(content, str):
                raise EpisodeError("it yielded chat messages in an episode that began as text; yield text, or set data.chat")
            return Rendered(content, self._foreign(content))
        text, ids = self._delta(as_messages(content))
        if ids and reply_ids and reply_ids[-1] == ids[0] and ids[0] in self._special:
            return Rendered(text.removeprefix(self._special[ids[0]]), ids[1:])
        return Rendered(text, ids)

    def _delta(self, messages: Sequence[Message]) -> Rendered:
        """Contents with the text of a special token in them are rendered as marks, and encoded on their own."""
        marks: dict[str, str] = {}
        digest = hashlib.blake2b(json.dumps(messages).encode(), digest_size=8).hexdigest()
        marked = []
        for number, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, str) and self._has_special(content):
                mark = f"{digest}x{number}x"
                marks[mark] = content
                message = {**message, "content": mark}
            if self._has_special(json.dumps(message, ensure_ascii=False)):
                raise EpisodeError("a chat message has the text of a special token outside its content; leave it out")
            marked.append(message)
        delta = delta_of(self._apply, marked)
        if any(delta.count(mark) != 1 for mark in marks):
            raise EpisodeError("the chat template does not write a content with the text of a special token exactly once")
        pieces = re.split(f"({'|'.join(marks)})", delta) if marks else [delta]
        ids = [id for piece in pieces for id in (self._foreign(marks[piece]) if piece in marks else self._encode(piece))]
        return Rendered("".join(marks.get(piece, piece) for piece in pieces), ids)

    def _has_special(self, text: str) -> bool:
        return self._looks_special.search(text) is not None

    def _encode(self, text: str, adds_special: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]) if text else []

    def _foreign(self, text: str) -> list[int]:
        """Tokens of a text in which nothing is special."""
        if not self._has_special(text):
            return self._encode(text)
        ids = list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        # What the vocabulary has no token for is unknown, as in any text.
        if found := set(ids) & (self._special.keys() - {self._tokenizer.unk_token_id}):
            names = ", ".join(self._special[id] for id in sorted(found))
            raise EpisodeError(f"an observation has the text of {names}, which this tokenizer cannot split into others")
        return ids

    @functools.cached_property
    def _probed(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "an episode is given as chat messages, but the tokenizer has no chat template; yield text, without data.chat"
            )
        if self._tools is not None:
            probe_tools(self._apply, [tool["function"]["name"] for tool in self._tools])
        probe(self._apply, self._by_message)

    def _apply(self, messages: Sequence[Message], begins_turn: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=self._tools, add_generation_prompt=begins_turn, tokenize=False
        )
        return str(text)


def as_messages(content: Content) -> list[Message]:
    """Text stands for one user message."""
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def conversation(prompt: Content, turns: Iterable[tuple[str, Content | None]]) -> list[Message]:
    """An episode as chat messages, for rewards that judge it whole.

    turns: what the model wrote, decoded and without its end-of-turn token, and the observation after it (None after the last).
    """
    messages = [*as_messages(prompt)]
    for text, observed in turns:
        messages.append({"role": "assistant", "content": text})
        if observed is not None:
            messages += as_messages(observed)
    return messages
