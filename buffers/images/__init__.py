"""The images of prompts. A row names each by digest, in a part `{"type": "image", "image": DIGEST}` of a chat message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_IMAGES = 64
"""Of a prompt."""
TAKE_IMAGES = "set data.images = true"
"""What lets a run have images that come while it goes on."""
IMAGES, IMAGE = "images", "image"
"""The columns that have them, and the parameters of rewards that get them: a list, and the only one."""


def images_of(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The digests in messages, in the order of their places."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(str(part.get("image")) for part in parts if isinstance(part, Mapping) and part.get("type") == "image")
