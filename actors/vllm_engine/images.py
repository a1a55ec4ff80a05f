"""Prompts with images in vLLM's terms. vLLM prepares images by the processor that actor and learner have, and so makes the same
arrays; their places it finds in the prompt's tokens as they are, and a prompt with other places is refused.

By itself vLLM takes a prompt with one token for each image and makes places of it: of ours it would make more, without a word.
What it knows of an image is held by a name, which says of which prompt's images it is one, and under which weights: some
families cut an image that stands alone into more tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import xxhash

from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.images.processor import ImageProcessor

# Prompts whose arrays are kept: those of completions that begin together.
_RECENT = 8


class ImagePrompts:
    """reader: vLLM's multi-modal processor of the model, which nothing else asks. Its methods may be called from any thread."""

    def __init__(self, reader: Any, images: ImageProcessor) -> None:
        self._reader, self._images, self._lock = reader, images.another(), threading.Lock()
        reader.info.get_hf_processor = lambda *kinds, **options: self._images.of_model
        reader._apply_prompt_updates = self._found
        if reader.info.get_hf_config().model_type == "llava_onevision":
            _read_together(reader, self._images.of_model)
        self._recent = lru_cache(_RECENT)(self._read)

    @property
    def sample(self) -> tuple[list[int], tuple[str, ...]]:
        return self._images.sample

    def prompt(self, token_ids: Sequence[int], images: tuple[str, ...], weights: str) -> dict[str, Any]:
        """What vLLM generates from. weights: a name of those that it serves. Raises EngineError for places that are not those
        of the images, DamagedError."""
        with self._lock:
            read = self._recent(tuple(token_ids), images)
        names = xxhash.xxh3_128_hexdigest(" ".join(images).encode())
        return {**read, "mm_hashes": {"image": [f"{weights}-{names}-{number}" for number in range(len(images))]}}

    def _read(self, token_ids: tuple[int, ...], images: tuple[str, ...]) -> Mapping[str, Any]:
        items = self._reader.info.parse_mm_data({"image": self._images.opened(images)})
        read: Mapping[str, Any] = self._reader(list(token_ids), items, {"image": list(images)})
        return read

    def _found(self, token_ids: list[int], updates: Mapping[str, Sequence[Any]]) -> tuple[list[int], Mapping[str, Any]]:
        """The prompt as it is, and where in it vLLM finds the images."""
        found = self._reader._find_mm_placeholders(token_ids, updates)
        ranges = [(each.start_idx, each.start_idx + each.length) for each in found.get("image", ())]
        filled = sum(token_ids[start:end].count(self._images.place_id) for start, end in ranges)
        # Text follows the last image, and a sampled token of an image only behind it.
        places = token_ids[: ranges[-1][1] + 1 if ranges else None].count(self._images.place_id)
        if filled != places or len(ranges) != len(updates["image"]):
            raise EngineError(
                f"a prompt has {places} places of {len(updates['image'])} images, and vLLM fills {filled} with {len(ranges)}: "
                "it reads images of this model otherwise than transformers. Set engine.kind = 'torch'"
            )
        return token_ids, found


def _read_together(reader: Any, processor: Any) -> None:
    """LLaVA-OneVision reads several images in one tile each, and vLLM would cut every one as if it stood alone."""
    given, alone = reader._get_hf_mm_inputs, reader.info.get_num_image_tokens
    are_several = False

    def together(*arguments: Any) -> Any:
        nonlocal are_several
        data, *rest = given(*arguments)
        are_several = len(data["images"]) > 1
        return {**data, "images": [data["images"]]}, *rest

    def num_places(**size: int) -> int:
        return int(processor.num_image_tokens + 1 if are_several else alone(**size))  # one at the end of the tile's lines

    reader._get_hf_mm_inputs, reader.info.get_num_image_tokens = together, num_places
