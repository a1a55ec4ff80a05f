"""How the turns of an episode become tokens. Pure, given a tokenizer.

    text    the first yield as prompts are; an observation is the tokens of its text
    chat    the first yield through the model's chat template; an observation is the template's *delta* (`chat_template`)

An episode is chat where `data.chat` is set, where its environment has tools, or where its first yield is messages. In it, text
stands for one user message.

An image goes with its whole conversation through the model's processor (`buffers/images/processor`): the row begins anew.

With `render = "split"` the whole conversation goes through the template before each turn, so that the model reads what it would
read elsewhere. Where that text begins with the text of the row, the tokens of the row stay and the rest is appended; where the
template has rewritten what was said, the row begins anew with all of it.

What an environment says may look like a special token (`<|im_end|>` on a page of the web). transformers, vLLM and SGLang let it
become one by default; an observation of ours never does, nor what an agent's call says: such a content is encoded apart from
the template's own text, split into ordinary tokens, and refused where that is impossible. Added tokens that are not marked
special (`<think>` of some tokenizers) and an environment's first yield are encoded as they are everywhere.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from async_rlhf.actors.environments.chat_template import delta_of, probe, probe_tools, probe_whole, whole_of
from async_rlhf.actors.environments.settings import Content, Message
from async_rlhf.actors.environments.tool_calls import Tool
from async_rlhf.actors.prompts import token_ids
from async_rlhf.buffers.errors import ConfigError, DamagedError, EpisodeError
from async_rlhf.buffers.images import MAX_IMAGES, TAKE_IMAGES, images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.buffers.images.processor import ImageProcessor

_NO_CHAT = "it yielded chat messages in an episode that began as text; yield text, or set data.chat"
# Sets of tools that calls brought; what a set's template makes of them is tried once.
_MAX_TOOL_SETS = 64


class Rendered(NamedTuple):
    """The model's input, as text and as token ids."""

    text: str
    ids: list[int]
    restarts: bool = False
    """Whether the row begins anew with it."""


class Renderer:
    """Turns yields into tokens. chat: text is given as a user message. render: as `EnvironmentConfig.render`. tools: those that
    the template is given, as JSON schemas; with some, text is given as a user message too. variables: of the template. images:
    prepares those in messages, where a run has some."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool,
        render: Literal["conversation", "by_message", "split"] = "conversation",
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self._variables, self._images = dict(variables or {}), images
        self._tokenizer, self._chat, self._render = tokenizer, chat or bool(tools), render
        self._tools = list(tools) or None  # For some templates an empty list is not the same as none.
        self._of_tools: dict[str, Renderer] = {}
        added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {**dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)), **added}
        longest_first = sorted(filter(None, self._special.values()), key=len, reverse=True)
        self._looks_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def place_id(self) -> int | None:
        """The token of images, where a run has some."""
        return None if self._images is None else self._images.place_id

    def check(self) -> None:
        """Before a run with `data.chat` or tools: raises ConfigError for a template that cannot take observations."""
        if self._chat:
            self._probed  # noqa: B018  it raises

    def given(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The one of a conversation whose template is given these tools; without any this one. Raises EpisodeError."""
        if not tools:
            return self
        name = json.dumps(tools, ensure_ascii=False)
        if self._has_special(name):
            raise EpisodeError("the schema of a tool has the text of a special token; leave it out")
        if name not in self._of_tools:
            made = copy.copy(self)
            made.__dict__.pop("_probed", None)
            made._tools, made._chat, made._of_tools = [{**tool} for tool in tools], True, {}
            if len(self._of_tools) == _MAX_TOOL_SETS:
                self._of_tools.clear()
            self._of_tools[name] = made
        return self._of_tools[name]

    def splits(self, prompt: Content) -> bool:
        """Whether an episode with this first yield is rendered as a whole before each turn (`whole`)."""
        return self._render == "split" and self.is_chat(prompt)

    def is_chat(self, prompt: Content) -> bool:
        """Whether an episode with this first yield goes through the chat template."""
        return self._chat or not isinstance(prompt, str)

    def prompt(self, content: Content, is_foreign: bool = False) -> Rendered:
        """The first yield, with the model's turn begun. is_foreign: what looks like a special token in it is none, as in an
        observation.

        Raises ConfigError as `check` does, EpisodeError for messages that the template refuses and for a prompt without tokens.
        """
        if not self.is_chat(content):
            assert isinstance(content, str)
            text, ids = content, self._encode(content, adds_special=True)
        else:
            self._probed  # noqa: B018  it raises
            messages = as_messages(content)
            said, marks = self._marked(messages) if is_foreign else (messages, {})
            if images_of(messages):
                return self._seen(said, marks)
            try:
                pieces = _pieces(self._apply(said, True), marks)
            except Exception as error:  # the template is the model's own code
                raise EpisodeError(f"the chat template refuses the prompt: {error}") from error
            text, ids = "".join(text for text, _ in pieces), self._encoded(pieces)
        if not ids:
            raise EpisodeError("the prompt has no tokens; yield what the model is to answer")
        return Rendered(text, ids)

    def observation(self, prompt: Content, content: Content, reply_ids: Sequence[int]) -> Rendered:
        """The observation behind the tokens that the model sampled in its turn (`reply_ids`).

        prompt: the episode's first yield. In a chat, an end-of-turn token that the model has written is not repeated; a turn
        that was cut off gets one.
        Raises EpisodeError for what the template refuses or leaves out, and for messages in an episode that began as text.
        """
        if not self.is_chat(prompt):
            if not isinstance(content, str):
                raise EpisodeError(_NO_CHAT)
            return Rendered(content, self._foreign(content))
        text, ids, _ = self._delta(as_messages(content))
        if ids and reply_ids and reply_ids[-1] == ids[0] and ids[0] in self._special:
            return Rendered(text.removeprefix(self._special[ids[0]]), ids[1:])
        return Rendered(text, ids)

    def whole(self, prompt: Content, turns: Sequence[tuple[str, Content]], row_ids: Sequence[int]) -> Rendered:
        """The continuation of a chat's row, or the whole conversation, with which a new row begins.

        prompt: the episode's first yield. turns: what the model wrote, decoded and without its end-of-turn token, and what was
        answered. row_ids: what the model has read and written since its row began.
        Raises EpisodeError for what the template refuses or leaves out.
        """
        if not self.is_chat(prompt):
            raise EpisodeError(_NO_CHAT)
        begun, answer, known = as_messages(prompt), as_messages(turns[-1][1]), list(row_ids)
        said, marks = self._marked(conversation(prompt, turns)[len(begun) :])
        if images_of([*begun, *said]):
            text, ids, _ = self._seen([*begun, *said], marks)
            is_behind = ids[: len(known)] == known and not images_of(answer)
            return Rendered(self._decode(ids[len(known) :]), ids[len(known) :]) if is_behind else Rendered(text, ids, True)
        last = len(said) - len(answer)
        pieces = _pieces(whole_of(self._apply, [*begun, *said[:last]], said[last:]), marks)
        text, ids = "".join(text for text, _ in pieces), self._encoded(pieces)
        if ids[: len(known)] == known:
            return Rendered(self._decode(ids[len(known) :]), ids[len(known) :])
        # A text has several encodings, and the model need not have sampled the one that the tokenizer makes of it.
        if not text.startswith(row := self._decode(known)):
            return Rendered(text, ids, restarts=True)
        return Rendered(text[len(row) :], self._encoded(_behind(pieces, len(row))))

    def _seen(self, messages: Sequence[Message], marks: Mapping[str, str]) -> Rendered:
        """A conversation with images as a whole. marks: as of `_marked`; the processor makes tokens of the whole text, so none
        of it can be encoded apart."""
        if self._images is None:
            raise EpisodeError(f"its messages have images, and this run takes none while it goes on; {TAKE_IMAGES}")
        if marks:
            special = next(iter(marks.values()))
            raise EpisodeError(f"a message beside images has the text of {special}, which cannot be kept apart there")
        if (count := len(images_of(messages))) > MAX_IMAGES:
            raise EpisodeError(f"its conversation has {count} images, the limit is {MAX_IMAGES}")
        try:
            text, ids = self._images.encode(messages, {**self._variables, "tools": self._tools})
        except (ConfigError, DamagedError) as error:
            raise EpisodeError(str(error)) from error
        return Rendered(text, ids)

    def _delta(self, messages: Sequence[Message]) -> Rendered:
        """Contents with the text of a special token in them are rendered as marks, and encoded on their own."""
        marked, marks = self._marked(messages)
        delta = delta_of(self._apply, marked)
        if any(delta.count(mark) != 1 for mark in marks):
            raise EpisodeError("the chat template does not write a content with the text of a special token exactly once")
        pieces = _pieces(delta, marks)
        return Rendered("".join(text for text, _ in pieces), self._encoded(pieces))

    def _marked(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """These messages with a mark for each text of a special token in their contents, and what the marks stand for: the
        template still sees the rest, which it may cut at."""
        marks: dict[str, str] = {}
        digest = hashlib.blake2b(json.dumps(messages).encode(), digest_size=8).hexdigest()

        def mark(found: re.Match[str]) -> str:
            name = f"{digest}x{len(marks)}x"
            marks[name] = found[0]
            return name

        marked = []
        for message in messages:
            if isinstance(content := message.get("content"), str):
                message = {**message, "content": self._looks_special.sub(mark, content)}
            elif content:  # images, and texts between them
                texts = ({"text": self._looks_special.sub(mark, part["text"])} if "text" in part else {} for part in content)
                message = {**message, "content": [part | text for part, text in zip(content, texts, strict=True)]}
            if self._has_special(json.dumps(message, ensure_ascii=False)):
                raise EpisodeError("a chat message has the text of a special token outside its content; leave it out")
            marked.append(message)
        return marked, marks

    def _encoded(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        return [id for text, is_foreign in pieces for id in (self._foreign(text) if is_foreign else self._encode(text))]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _has_special(self, text: str) -> bool:
        return self._looks_special.search(text) is not None

    def _encode(self, text: str, adds_special: bool = False) -> list[int]:
        return token_ids(text, self._tokenizer, is_rendered=not adds_special) if text else []

    def _foreign(self, text: str) -> list[int]:
        """Tokens of a text in which nothing is special."""
        if not self._has_special(text):
            return self._encode(text)
        ids = token_ids(text, self._tokenizer, is_rendered=True, split_special_tokens=True)
        # What the vocabulary has no token for is unknown, as in any text.
        if found := set(ids) & (self._special.keys() - {self._tokenizer.unk_token_id}):
            names = ", ".join(self._special[id] for id in sorted(found))
            raise EpisodeError(f"an observation has the text of {names}, which this tokenizer cannot split into others")
        return ids

    @functools.cached_property
    def _probed(self) -> None:
        if not (self._images or self._tokenizer).chat_template:
            raise ConfigError(
                "an episode is given as chat messages, but the tokenizer has no chat template; yield text, without data.chat"
            )
        if self._tools is not None:
            probe_tools(self._apply, [tool["function"]["name"] for tool in self._tools], self._render == "split")
        if self._render == "split":
            probe_whole(self._apply)
        else:
            probe(self._apply, self._render == "by_message")

    def _apply(self, messages: Sequence[Message], begins_turn: bool) -> str:
        variables = {**self._variables, "tools": self._tools}
        if self._images is not None:
            return self._images.rendered(messages, variables, begins_turn)
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=begins_turn, tokenize=False, **variables
        )
        return str(text)


def _pieces(text: str, marks: Mapping[str, str]) -> list[tuple[str, bool]]:
    """The text, cut at marks, for each of which what it stands for; and whether it is that."""
    pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
    return [(marks.get(piece, piece), piece in marks) for piece in pieces]


def _behind(pieces: Iterable[tuple[str, bool]], length: int) -> list[tuple[str, bool]]:
    """Without the first `length` characters."""
    found = []
    for text, is_foreign in pieces:
        found.append((text[length:], is_foreign))
        length = max(0, length - len(text))
    return found


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
