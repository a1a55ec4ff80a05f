"""Stub."""

from typing import Any


class _Text:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, content: Any) -> list[int]:
        return list(self._tokenizer(content)["input_ids"])

    def observation(self, content: Any, turn: Any) -> list[int]:
        return list(self._tokenizer(content, add_special_tokens=False)["input_ids"])


def make_rendering(tokenizer: Any, chat: bool, render: str) -> _Text:
    return _Text(tokenizer)
