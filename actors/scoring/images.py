"""The images of a prompt on their way to a reward: paths travel, and the process that calls it opens them.

A path names a file of an `ImageStore` by its digest, so what is opened is what the model saw, or the call has failed. A server
on another machine does not have the files: no images go there (`remote`). Imports little: each process of a reward reads this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.actors.rewards import Signature
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.images import IMAGE, IMAGES


def with_paths(fields: Mapping[str, Any], directory: Path | None) -> Mapping[str, Any]:
    """The fields of a completion with paths for its digests. directory: of the store; None: that of this process."""
    if not (digests := fields.get(IMAGES)):
        return fields
    from async_rlhf.buffers.images.store import ImageStore, scratch

    store = scratch() if directory is None else ImageStore(directory.absolute())
    return {**fields, IMAGES: [str(store.path(digest)) for digest in digests]}


def with_images(signature: Signature, members: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The fields of completions with images of Pillow, mode RGB, where the function takes them: `images` is a list, empty for a
    prompt without; `image` the only one, or None. What takes every column gets `images` where there are some.

    Raises DamagedError for one that is missing or another, RewardError where a prompt of several is judged by one, and where
    images that it asks for were not sent.
    """
    names = signature.image_names
    if names and any(member.get(IMAGES, ()) is None for member in members):
        raise RewardError(
            f"asks for {min(names)!r}, and images go to no server on another machine: name its file in rewards.functions"
        )
    if any(member.get(IMAGES) for member in members):
        names |= {IMAGES} if signature.any_column else set()
    elif not names.intersection(signature.required):  # its defaults hold
        return members
    from async_rlhf.buffers.images.store import ImageStore

    found = []
    for member in members:
        paths = [Path(path) for path in member.get(IMAGES) or ()]
        images = [ImageStore(path.parent).open(path.name) for path in paths]
        if IMAGE in names and len(images) > 1:
            raise RewardError(f"takes one `image`, and a prompt has {len(images)}: take `images`, a list")
        seen: dict[str, Any] = {IMAGES: images, IMAGE: next(iter(images), None)}
        found.append({**member, **{name: seen[name] for name in names if IMAGES in member or name not in member}})
    return found
