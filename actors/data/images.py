"""Images in a row of the data, in every form in which they are given, to chat messages that name them by digest.

    the column `images` or `image`    one, or a list: bytes, a path seen from the file, a data URL, {"bytes", "path"}, an image
                                      of Pillow; at the places of the prompt, else before the text of its first user message
    a part of a message               the same, as {"type": "image", "image": ...}, or in the forms of OpenAI and Anthropic
    a place                           {"type": "image"}, or `<image>` in text, as often as the column has images

A text prompt with images is a chat of one user message. Nothing is fetched from the network. Pillow
is imported where an image is read: each process of environments and agents has this module, and few of them need it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.buffers.images import IMAGE, IMAGES, MAX_IMAGES, TAKE_IMAGES

COLUMNS = (IMAGES, IMAGE)
_KINDS = ("image", "image_url", "input_image")
# Where a part of a message, or an object of a column, has its image.
_PLACES = ("image", "image_url", "source", "bytes", "base64", "data", "path", "url")
_BESIDE = {"type", "detail", "media_type", "cache_control"}
_MARK = "<image>"
_DATA_URL = "data:;base64,"

Read = Callable[[Any], str]
"""An image in any form to its digest. Raises ValueError."""


def take_none(given: Any) -> str:
    """The reader where no image can come while a run goes on. Raises ValueError."""
    raise ValueError(f"this run takes none while it goes on: {TAKE_IMAGES}, on one machine and in its own processes")


class ImageLoader:
    """Adds images to a store. folder: from which paths are seen; None: those are refused. add: as of `ImageStore`. known: what
    may be named by digest."""

    def __init__(self, folder: Path | None, add: Callable[[bytes], str], known: Container[str] = ()) -> None:
        self._folder, self._add, self._known = folder, add, known

    def __call__(self, given: Any) -> str:
        while isinstance(given, Mapping):
            given = _only(given, "an object")
        if not isinstance(given, str):
            raise ValueError(f"a {type(given).__name__} is no image; give a path, bytes, a data URL or an image of Pillow")
        if given in self._known:
            return given
        try:
            return self._add(_from_url(given) if given.startswith("data:") else self._from_path(given))
        except ValueError as error:
            raise ValueError(f"{given[:60]!r}: {error}") from error
        except OSError as error:
            raise ValueError(
                f"{given[:60]!r} cannot be kept: {error}; give its disk room (TMPDIR names that of rows before a run)"
            ) from error

    def _from_path(self, given: str) -> bytes:
        if re.match(r"(https?|s3|gs|hf)://", given):
            raise ValueError("nothing is fetched while a run goes on; download it first, and give its path, or a data URL")
        if self._folder is None:
            raise ValueError("a data URL was expected: data:image/png;base64,...")
        try:
            path = self._folder / Path(given.removeprefix("file://")).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{error}; write the path without ~") from error
        try:
            if not path.is_file():
                raise ValueError(f"there is no file {path}; a path is seen from the folder of the data, or absolute")
            from async_rlhf.buffers.images.decoding import MAX_BYTES

            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def _from_url(given: str) -> bytes:
    head, comma, data = given.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("a data URL with base64 was expected: data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its base64 is damaged: {error}") from error


def is_image(value: Any) -> bool:
    """Whether it is one of Pillow, which is not imported for that."""
    return hasattr(value, "getexif") and hasattr(value, "convert")


def as_text(value: Any) -> Any:
    """Bytes and images of Pillow, wherever they are in it, as data URLs. Raises ValueError for an image that is refused."""
    if isinstance(value, bytes | bytearray | memoryview):
        return _DATA_URL + base64.b64encode(value).decode()
    if is_image(value):
        from async_rlhf.buffers.images.decoding import encoded

        return _DATA_URL + base64.b64encode(encoded(value)).decode()
    if isinstance(value, Mapping):
        return {key: as_text(each) for key, each in value.items()}
    return [as_text(each) for each in value] if isinstance(value, list | tuple) else value


def has_images(prompt: Any, columns: Mapping[str, Any]) -> bool:
    """Whether a row has any, a place for one, or a column of them, which may be empty."""
    return any(name in columns for name in COLUMNS) or (isinstance(prompt, list) and any(map(_is_image, _parts(prompt))))


def with_images(prompt: Any, columns: dict[str, Any], read: Read) -> Any:
    """The prompt of a row; where it has images, messages with their digests. Takes its columns of images out of `columns`.

    Raises ValueError: which image, what is wrong.
    """
    given = taken_images(columns)
    if not given and not has_images(prompt, columns):
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_copied(each) for each in prompt]
    images = [part for part in _parts(messages) if _is_image(part)]
    places = [part for part in images if not _sources(part)]
    if given and not images:
        places = images = [*_marked(messages)] or [*_put_first(messages, len(given))]
    if len(places) != len(given):
        raise ValueError(
            f"its messages have {len(places)} places for images, and its columns {len(given)} images; give as many, or no "
            "places: then they stand before the text of the first user message"
        )
    for part, each in zip(places, given, strict=True):
        part["image"] = each
    _name(images, read)
    return messages


def taken_images(columns: dict[str, Any]) -> list[Any]:
    """Takes the images out of the columns of a row. Raises ValueError where two have some."""
    found = {name: value for name in COLUMNS if (value := columns.pop(name, None))}
    if len(found) > 1:
        raise ValueError("it has the columns 'images' and 'image'; give one of them")
    for value in found.values():
        return [*value] if isinstance(value, list | tuple) else [value]
    return []


def named(messages: Sequence[Mapping[str, Any]], read: Read) -> list[Any]:
    """Chat messages whose images, each in its part, are named by digest. Raises ValueError: which image, what is wrong."""
    found = [_copied(each) for each in messages]
    _name([part for part in _parts(found) if _is_image(part)], lambda given: read(as_text(given)))
    return found


def _name(parts: Sequence[dict[str, Any]], read: Read) -> None:
    if len(parts) > MAX_IMAGES:
        raise ValueError(f"it has {len(parts)} images, the limit is {MAX_IMAGES}")
    for number, part in enumerate(parts, 1):
        try:
            digest = read(_only(part, "the part"))
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error
        part.clear()
        part.update(type="image", image=digest)


def _copied(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    return {**message, "content": [_copied_part(part) for part in content]} if isinstance(content, list) else {**message}


def _copied_part(part: Any) -> Any:
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _sources(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _BESIDE and value is not None}


def _only(given: Mapping[str, Any], what: str) -> Any:
    """The image that an object has: its bytes where it has both these and a path. Raises ValueError."""
    found = _sources(given)
    if unknown := sorted(found.keys() - set(_PLACES)):
        raise ValueError(f"{what} has the key {unknown[0]!r}, which is not read; leave it out")
    if not found:
        raise ValueError(f"{what} has no image; one of {', '.join(_PLACES)} was expected")
    name = next(name for name in _PLACES if name in found)
    if name in ("base64", "data") and isinstance(found[name], str):
        return _DATA_URL + found[name]
    return found[name]


def _marked(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Puts a place where text has the mark; gives the places."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and _MARK in content:
            parts = list[dict[str, Any]]()
            for number, text in enumerate(content.split(_MARK)):
                if number:
                    parts.append({"type": "image"})
                if text:
                    parts.append({"type": "text", "text": text})
            message["content"] = parts
            yield from filter(_is_image, parts)


def _put_first(messages: list[Any], count: int) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            rest = content if isinstance(content, list) else [{"type": "text", "text": content}] * (content is not None)
            places = [{"type": "image"} for _ in range(count)]
            message["content"] = [*places, *rest]
            yield from places
            return
    raise ValueError("it has images, and no message of the user to put them into")
