"""A prompt with images becomes the same tokens and arrays wherever it is read, and what cannot be read is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from tests import image_models
from tests.conftest import SPELLER

SIZES = ((30, 20), (16, 44), (24, 24), (200, 31))


@pytest.fixture(params=[*image_models.MAKERS])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def processor_of(family: str, directory: Path) -> tuple[ImageProcessor, list[str]]:
    image_models.make(family, directory)
    store = ImageStore(directory / "images")
    return ImageProcessor(directory, store), [store.add(image_models.drawn(*size)) for size in SIZES]


def test_the_number_of_tokens_follows_from_the_sizes_of_images(family: str, tmp_path: Path) -> None:
    processor, images = processor_of(family, tmp_path)
    for chosen in (images[:1], images[1:2], images[3:], images, images[::-1], ()):
        messages = [{"role": "system", "content": "be brief"}, *image_models.asking(*chosen)]
        text, ids = processor.encode(messages, {})
        assert len(ids) == processor.num_tokens(messages, {}) and text == processor.text(messages, {})
        assert (processor.place_id in ids) == bool(chosen)


def test_what_the_tower_takes_is_the_same_with_and_without_the_text(family: str, tmp_path: Path) -> None:
    processor, images = processor_of(family, tmp_path)
    other = ImageProcessor(tmp_path, ImageStore(tmp_path / "images"))
    for chosen in (tuple(images[:1]), tuple(images)):
        processor.encode(image_models.asking(*chosen), {})
        one, two = processor.inputs(chosen), other.inputs(chosen)
        assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_arrays_are_kept_within_their_bytes(tmp_path: Path) -> None:
    processor, images = processor_of("gemma3", tmp_path)
    processor._most_bytes = 2 * processor.inputs((images[0],))["pixel_values"].nbytes
    for image in images:
        processor.inputs((image,))
    assert list(processor._cache) == [(images[2],), (images[3],)]


@pytest.mark.parametrize(
    ("family", "spelt"), [("qwen2_5_vl", "<|image_pad|>"), ("gemma3", "<image_soft_token>"), ("gemma3", "<start_of_image>")]
)
def test_a_text_that_spells_a_place_is_refused(family: str, spelt: str, tmp_path: Path) -> None:
    processor, images = processor_of(family, tmp_path)
    with pytest.raises(
        ConfigError, match=f"a prompt spells '{spelt}', which stands for an image in this model".replace("|", r"\|")
    ):
        processor.encode(image_models.asking(images[0], text=f"see {spelt}?"), {})


def change(directory: Path, file: str, **settings: Any) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_template_that_leaves_images_out_is_refused(tmp_path: Path) -> None:
    processor_of("internvl", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] | length }}{% endfor %}")
    processor = ImageProcessor(tmp_path, ImageStore(tmp_path / "images"))
    with pytest.raises(ConfigError, match=r"writes 0 places \('<IMG_CONTEXT>'\) for 2 images"):
        processor.encode(image_models.asking("a" * 32, "b" * 32), {})


def test_a_prompt_that_ends_with_an_image_is_refused(tmp_path: Path) -> None:
    processor_of("llava_onevision", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("?<image>")
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ConfigError, match="a prompt ends with an image, and text must follow it"):
        ImageProcessor(tmp_path, store).encode(image_models.asking(store.add(image_models.drawn(9, 9))), {})


def test_a_model_without_a_processor_or_a_tower_is_refused(tmp_path: Path) -> None:
    image_models.make("smolvlm", tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / name).unlink()
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json, by which images are prepared"):
        ImageProcessor(tmp_path / "model", store)
    with pytest.raises(ConfigError, match="reads no images, and this run has some"):
        ImageProcessor(SPELLER, store)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    processor, _ = processor_of("gemma3", tmp_path)
    with pytest.raises(DamagedError, match="a" * 32):
        processor.inputs(("a" * 32,))


def test_a_size_at_which_images_are_read_is_that_of_the_model_directory(tmp_path: Path) -> None:
    processor, images = processor_of("qwen2_5_vl", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    change(tmp_path / "two", "preprocessor_config.json", size={"shortest_edge": 64, "longest_edge": 256})
    other = ImageProcessor(tmp_path / "two", ImageStore(tmp_path / "one" / "images"))
    one, two = (each.encode(image_models.asking(images[0]), {}).ids for each in (processor, other))
    assert len(one) > len(two)
