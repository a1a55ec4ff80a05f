"""Chat messages as other people write them, read as those that a text template can write. Imports little: a process of an
environment reads them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

# Kinds of parts that are text, as clients of OpenAI's two interfaces write them; a part without a kind is text if it has one.
_TEXT_PARTS = ("text", "input_text", "output_text", None)
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")
_NO_TEXT = {"image", "images", "image_url", "audio", "audios", "video", "videos"}


def chat_of(given: Sequence[Any], *, with_images: bool = False) -> list[dict[str, Any]]:
    """Chat messages as templates read them. with_images: the content of a message may be parts, of which some are images by
    digest, `{"type": "image", "image": DIGEST}`; elsewhere they are refused.

    Keys whose value is null are dropped (Arrow gives each message those of all others, and templates ask whether a key is
    there), an empty list of tool calls too; parts of text are joined. Raises ValueError: the message, the key, what is wrong.
    """
    return [_message(f"message {number}", each, with_images) for number, each in enumerate(given, 1)]


def _message(which: str, given: Any, with_images: bool) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{which} is a {type(given).__name__}")
    found = {key: value for key, value in _without_nulls(given).items() if key != "tool_calls" or value}
    if not (isinstance(found.get("role"), str) and {"content", "tool_calls"} & found.keys()):
        raise ValueError(f"{which} has no {'content' if isinstance(found.get('role'), str) else 'role'}")
    if found.keys() & _NO_TEXT:
        raise ValueError(f"{which} has the key {min(found.keys() & _NO_TEXT)!r}, which is no text; leave it out")
    parts = {"content"} if with_images else {}
    return found | {key: _said(f"{which}, key {key!r}", found[key], key in parts) for key in _TEXT_KEYS if key in found}


def _said(where: str, value: Any, with_images: bool) -> str | list[dict[str, str]]:
    """Text; or images and the texts between them, joined. Raises ValueError."""
    if not (with_images and isinstance(value, list) and any(map(_is_image, value))):
        return _text(where, value)
    found = list[dict[str, str]]()
    for is_image, parts in groupby(value, _is_image):
        if is_image:
            found += [{"type": "image", "image": part["image"]} for part in parts]
        elif text := _text(where, [*parts]):
            found.append({"type": "text", "text": text})
    return found


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def _text(where: str, value: Any) -> str:
    """Raises ValueError."""
    texts = []
    for number, part in enumerate(value if isinstance(value, list) else [value], 1):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, part)
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            part_of = f": part {number}" if isinstance(value, list) else ""
            raise ValueError(f"{where}{part_of} is {kind or type(part).__name__!r}, and text was expected; write it as text")
        texts.append(text)
    return "".join(texts)
