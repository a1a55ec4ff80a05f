"""Whether a model can take prompts: how many tokens they have, and which of their characters it has no token for. No torch.

The tokenizer's own file (`tokenizer.json`) is read by the library that transformers calls too. To tokenize 100,000 prompts
takes it half a minute, so only those are tokenized that may be too long: a token stands for a byte at least.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from async_rlhf.actors.prompts import NO_CHAT_TEMPLATE, Row, Template
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import from_pretrained

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Mapping[str, Any]], str]
"""Messages to text, with further variables of the chat template."""

_BATCH = 4096
# What a chat template is given beside variables of its own.
_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}


@dataclass(frozen=True)
class PromptLengths:
    """The lengths of prompts, by their numbers."""

    too_long: dict[int, int]
    """Tokens of the prompts over the limit."""
    empty: list[int]
    """Prompts without a token."""
    unknown: list[str]
    """Characters that are not in the vocabulary."""
    num_unknown: int
    """Prompts with one of them."""


class PromptTokenizer:
    """The `tokenizer.json` of a model directory. Raises ConfigError where there is none, or one that cannot be read."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"model = {str(directory)!r} has no tokenizer.json: copy it from where the model came, or have transformers "
                "make it of older files: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"model file {str(file)!r} cannot be used: {error}. Copy it again from its source") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown_id = None if unknown is None else self._tokenizer.token_to_id(unknown)
        self._directory = directory
        self._render: Render | None = None

    def normal(self, text: str) -> str:
        """As the tokenizer sees it: of equal ones the tokens are equal."""
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def texts(self, most: int) -> dict[int, str]:
        """The texts of at most `most` tokens by id, spread over the whole vocabulary."""
        ids = range(0, size := self._tokenizer.get_vocab_size(), max(1, -(-size // most)))
        return {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in ids}

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Token ids, with special tokens or without."""
        return [each.ids for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]

    def text(self, row: Row, template: Template) -> str:
        """The model's prompt. Raises ConfigError as `Template.said`, and for messages that the chat template refuses."""
        said = template.said(row)
        if isinstance(said, str):
            return said
        self._render = self._render or _renderer(self._directory)
        return self._render(said, template.variables)

    def lengths(self, texts: Sequence[str], are_chats: Sequence[bool], limit: int) -> PromptLengths:
        """limit: in tokens. are_chats: where the chat template has written the special tokens already.

        Raises ConfigError for what is no text.
        """
        unknown, vanishing, growing = self._characters(texts)
        special = {chat: len(self._encode([""], not chat)[0]) for chat in (False, True)}
        too_long: dict[int, int] = {}
        empty: list[int] = []
        for chat in sorted(set(are_chats)):
            suspects = [
                number
                for number, (text, is_chat) in enumerate(zip(texts, are_chats, strict=True))
                if is_chat is chat
                and (
                    _most_tokens(text) + special[chat] > limit
                    or vanishing.issuperset(text)
                    or (growing and not growing.isdisjoint(text))
                )
            ]
            for number, num_tokens in zip(suspects, self._count([texts[n] for n in suspects], not chat), strict=True):
                if num_tokens > limit:
                    too_long[number] = num_tokens
                elif num_tokens == 0:
                    empty.append(number)
        num_unknown = sum(not unknown.isdisjoint(text) for text in texts) if unknown else 0
        return PromptLengths(too_long, sorted(empty), sorted(unknown), num_unknown)

    def remarks(self, texts: Sequence[str], are_chats: Sequence[bool]) -> list[str]:
        """Which of the tokens that the tokenizer adds to plain texts the model would read in a wrong place."""
        (plain,), (whole,) = (self._encode([texts[0] if texts else "a"], special) for special in (False, True))
        at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        found = []
        if (end := whole[at + len(plain) :]) and not all(are_chats):
            found.append(
                f"the tokenizer appends {self._tokenizer.id_to_token(end[0])!r} to every prompt: the model reads a text that "
                "is over. Give chat messages, or take it out of the post_processor of tokenizer.json."
            )
        begin = str(self._tokenizer.id_to_token(whole[0])) if at else "\0"
        if twice := sum(text.startswith(begin * (1 + chat)) for text, chat in zip(texts, are_chats, strict=False)):
            found.append(f"{twice} prompts begin with {begin!r}, and it is added to them once more; leave it out.")
        return found

    def _count(self, texts: Sequence[str], special: bool) -> Iterator[int]:
        for start in range(0, len(texts), _BATCH):
            yield from map(len, self._encode(texts[start : start + _BATCH], special))

    def _characters(self, texts: Sequence[str]) -> tuple[set[str], set[str], set[str]]:
        """Characters of these texts not in the vocabulary, that leave no token, and that make more tokens than bytes."""
        seen: set[str] = set()
        seen.update(*texts)
        try:
            "".join(seen).encode()
        except UnicodeEncodeError as error:
            number = next(number for number, text in enumerate(texts) if error.object[error.start] in text)
            raise ConfigError(
                f"prompt {number} is no text: it has the half of a surrogate pair {error.object[error.start]!r}; remove it"
            ) from error
        characters = sorted(seen)
        ids = dict(zip(characters, self._encode(characters, False), strict=True))
        vanishing = {character for character in characters if not ids[character]}
        unknown = {character for character in characters if self._unknown_id in ids[character]} | vanishing
        growing = {character for character in characters if len(ids[character]) > _most_tokens(character)}
        return {character for character in unknown if not character.isspace()}, vanishing, growing


def _most_tokens(text: str) -> int:
    """A token for each byte, and one for a space that some tokenizers put before a text."""
    return 1 + (len(text) if text.isascii() else len(text.encode()))


def _renderer(directory: Path) -> Render:
    """As `apply_chat_template` renders: by the same function, which needs no torch. Raises ConfigError without a template."""
    described = _json(directory / "tokenizer_config.json")
    template = _chat_template(directory, described)
    from transformers.utils.chat_template_utils import render_jinja_template  # a second, which only messages pay

    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in described.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    if set(re.findall(r"\w+_token\b", template)) - special.keys():  # declared in another file, or by the tokenizer's class
        from transformers import AutoTokenizer  # which imports torch

        special |= from_pretrained(AutoTokenizer, directory).special_tokens_map

    def render(messages: Messages, variables: Mapping[str, Any]) -> str:
        for name in variables:
            if name in _RENDERING or not re.search(rf"\b{re.escape(name)}\b", template):
                close = get_close_matches(name, set(re.findall(r"\b[a-z]\w*\b", template)) - _RENDERING, n=1)
                near = f"did you mean {close[0]!r}?" if close else "leave it out"
                raise ConfigError(f"chat_template_kwargs: {name!r} is no variable of the model's chat template; {near}")
        given = {**special, **variables}
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **given)
        except Exception as error:  # a template is a program: it may divide by zero, or call itself for ever
            raise ConfigError(f"the model's chat template refuses {str(messages)[:80]}: {error}") from error
        return str(texts[0])

    return render


def _chat_template(directory: Path, described: dict[str, Any]) -> str:
    """The file beside the tokenizer comes first, then its configuration, of several the default, as in transformers."""
    file = directory / "chat_template.jinja"
    try:
        found = file.read_text(encoding="utf-8") if file.is_file() else described.get("chat_template")
        if isinstance(found, list):
            found = {each["name"]: each["template"] for each in found}
    except (UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"the chat template of model = {str(directory)!r} cannot be read: {error!r}") from error
    if isinstance(found, dict):
        found = found.get("default")
    if not isinstance(found, str) or not found:
        raise ConfigError(NO_CHAT_TEMPLATE)
    return found


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
