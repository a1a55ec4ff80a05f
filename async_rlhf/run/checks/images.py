"""Rules about prompts with images: whether engine and learner read them, and how long prompts are with them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from async_rlhf.actors.data.tokens import PromptLengths
from async_rlhf.actors.prompts import Row, Template
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.model_directory import model_type
from async_rlhf.run.config import Config
from async_rlhf.run.run_data import kept_images


def check_reading(config: Config) -> None:
    """Raises ConfigError for settings with which prompts with images cannot be sampled, or learned from."""
    if found := "\n".join(f"prompts have images, with {each}" for each in _obstacles(config)):
        raise ConfigError(found)


def _obstacles(config: Config) -> Iterator[str]:
    if obstacle := config.engine.images_obstacle(model_type(Path(config.model))):
        yield obstacle
    if config.learner.backend != "torch":
        yield f"learner.backend = {config.learner.backend!r}; only 'torch' learns from images"
    if config.data.images and (config.launch.kind != "local" or len(config.placement.hosts) > 1):
        yield "several machines (launch.kind, placement.hosts): those that come while it goes on (data.images) stay on one"
    if config.learner.compile:
        yield "learner.compile = true, which is for text; set it to false"


def processor_of(config: Config, rows: Sequence[Row]) -> ImageProcessor | None:
    """What prepares the images of these rows; None where none has any, and none may come. Raises ConfigError as
    `ImageProcessor`."""
    first = next((row.images[0] for row in rows if row.images), None)
    if first is None and not config.data.images:
        return None
    here = scratch()  # unless a run keeps them, which is resumed
    is_kept = first is not None and first not in here
    return ImageProcessor(Path(config.model), kept_images(config.run_dir) if is_kept else here)


@dataclass(frozen=True)
class ImageLoad:
    """What prompts with images need memory for, of one that is as long as prompts may be, with images like a row's."""

    prompts: int
    """Rows with images."""
    places: int
    numbers: int
    """In the arrays that a tower takes for it, float32."""
    patches: int
    """Tokens of the tower."""
    pixels: int
    """Of its images decoded."""


def image_load(config: Config, rows: Sequence[Row], processor: ImageProcessor | None) -> ImageLoad | None:
    """None where no row has images and none may come; where some may, there is no limit to them. Raises ConfigError as
    `ImageProcessor.encode`, DamagedError."""
    if processor is None:
        return None
    shown = [row for row in rows if row.images]
    ids, images = processor.sample
    if shown:
        template, images = config.data.row_template, shown[0].images
        said = template.said(shown[0])
        assert not isinstance(said, str)
        ids = processor.encode(said, template.variables).ids
    places = max(1, ids.count(processor.place_id))
    most = config.generation.max_prompt_length
    numbers = sum(each.size for each in processor.inputs(images).values())
    pixels = sum(math.prod(each.size) for each in processor.opened(images))
    patches = 0
    with suppress(ConfigError):  # of such a family nothing is estimated
        patches = processor.num_patches(images)
    prompts = sys.maxsize if config.data.images else len(shown)
    return ImageLoad(prompts, most, *(each * most // places for each in (numbers, patches, pixels)))


def read_text(row: Row, template: Template, processor: ImageProcessor) -> str:
    """The model's prompt, with a place for each image. Raises ConfigError as `ImageProcessor.encode`."""
    said = template.said(row)
    return said if isinstance(said, str) else processor.text(said, template.variables)


def with_images(
    found: PromptLengths, rows: Sequence[Row], template: Template, processor: ImageProcessor, limit: int
) -> PromptLengths:
    """The lengths of rows with their images' tokens, which follow from the sizes of images. found: as if each were one token.
    Raises ConfigError, DamagedError."""
    lengths = dict(found.too_long)
    for number, row in enumerate(rows):
        if row.images:
            said = template.said(row)
            assert not isinstance(said, str)
            if (count := processor.num_tokens(said, template.variables)) > limit:
                lengths[number] = count
    return replace(found, too_long=dict(sorted(lengths.items())))
