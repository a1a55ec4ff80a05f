"""From chat messages with images to what a model reads: text, token ids with a token for each place of an image, and the
arrays that the model's tower takes. One way for actor, learner and checks, by the files of the model directory. No torch.

An image's place is a token of `place_id` inside a prompt with images, and nothing else: text that spells such a token is
refused, and one that is sampled is a token as any other. What the tower takes follows from the images of a prompt together,
in their order, and from no text: some families cut an image that stands alone into more tiles than one of several.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images import images_of
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.model_directory import LOADING, PROCESSOR_FILES, from_pretrained, reads_images

Messages = Sequence[Mapping[str, Any]]
Arrays = Mapping[str, np.ndarray]
"""Keyword arguments of a model, by name."""

# What a processor returns about the text.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
ARRAYS_BYTES, FEATURES_BYTES = 256 << 20, 1 << 30
"""What a process keeps at most of what images were prepared to, and of what a tower made of them."""
_EXPANSIONS = 4096
_SAMPLE = ((64, 48), (40, 72))


class Encoded(NamedTuple):
    """A prompt: its text before places were made of images, and its token ids."""

    text: str
    ids: list[int]


class ImageProcessor:
    """Of a model directory. store: where the images are. Raises ConfigError for a model that reads none or has no processor.

    Owns the arrays of the images that were last used, at most `cache_bytes`.
    """

    def __init__(self, directory: Path, store: ImageStore, cache_bytes: int = ARRAYS_BYTES) -> None:
        from transformers import AutoConfig

        self._directory, self.store, self._most_bytes = directory, store, cache_bytes
        self._processor = _processor(directory)
        self._tokenizer = self._processor.tokenizer
        config = from_pretrained(AutoConfig, directory)
        named = getattr(config, "image_token_id", None)
        self.place_id = int(getattr(config, "image_token_index", -1) if named is None else named)
        self.mark = str(self._processor.image_token)
        self._marks = {self.mark, str(self._tokenizer.convert_ids_to_tokens(self.place_id))}
        self.chat_template = getattr(self._processor, "chat_template", None) or self._tokenizer.chat_template
        vision = config.vision_config.to_dict()
        side, frames = vision.get("patch_size", 0), vision.get("temporal_patch_size") or 1
        self._patch = 3 * frames * (math.prod(side) if isinstance(side, list | tuple) else side**2)
        self._cache: OrderedDict[tuple[str, ...], Arrays] = OrderedDict()
        self._expansion = lru_cache(_EXPANSIONS)(self._expanded)

    def another(self) -> ImageProcessor:
        """One of its own for another thread."""
        return ImageProcessor(self._directory, self.store, self._most_bytes)

    @property
    def of_model(self) -> Any:
        """The processor of transformers."""
        return self._processor

    def opened(self, images: Sequence[str]) -> list[Any]:
        """These images, by Pillow, those of `sample` too. Raises DamagedError."""
        made_up = dict(_made_up())
        return [made_up[name] if name in made_up else self.store.open(name) for name in images]

    def encode(self, messages: Messages, variables: Mapping[str, Any]) -> Encoded:
        """variables: of the chat template. Raises ConfigError for messages that it refuses or whose images it leaves out, for a
        text that spells the token of an image, and for a prompt that ends with one; DamagedError without an image."""
        text, images = self._rendered(messages, variables)
        if not images:
            return Encoded(text, list(self._tokenizer(text, add_special_tokens=False)["input_ids"]))
        return Encoded(text, self._processed(text, images))

    def text(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        """That of `encode`. Raises the same ConfigError."""
        return self._rendered(messages, variables)[0]

    def num_tokens(self, messages: Messages, variables: Mapping[str, Any]) -> int:
        """Tokens of `encode`, from the sizes of images alone. Raises the same."""
        text, images = self._rendered(messages, variables)
        plain = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return plain + (self._expansion(tuple(map(self.store.size, images))) if images else 0)

    def inputs(self, images: tuple[str, ...]) -> Arrays:
        """What the model's tower takes for the images of a prompt. Raises DamagedError."""
        if images not in self._cache:
            self._processed(self.mark * len(images), images)
        self._cache.move_to_end(images)
        return self._cache[images]

    def rendered(self, messages: Messages, variables: Mapping[str, Any], begins_turn: bool = True) -> str:
        """What the chat template writes. Raises what it raises."""
        text = self._tokenizer.apply_chat_template(
            [_as_parts(message) for message in messages],
            chat_template=self.chat_template,
            add_generation_prompt=begins_turn,
            tokenize=False,
            **variables,
        )
        return str(text)

    def num_patches(self, images: tuple[str, ...]) -> int:
        """The tokens of the tower for these images, with those of padding. Raises ConfigError for a family that does not say
        how it cuts images, DamagedError."""
        pixels = self.inputs(images).get("pixel_values")
        if pixels is None or not self._patch:
            raise ConfigError(
                f"how model = {str(self._directory)!r} cuts images is not known: set learner.train_vision = false"
            )
        return int(pixels.size // self._patch)

    @cached_property
    def sample(self) -> tuple[list[int], tuple[str, ...]]:
        """A made-up prompt with two images of different shapes, which no store has: token ids, and their names."""
        names = tuple(name for name, _ in _made_up())
        parts = [{"type": "image", "image": name} for name in names]
        text, _ = self._rendered([{"role": "user", "content": [*parts, {"type": "text", "text": "a b"}]}], {})
        return self._processed(text, names), names

    def _rendered(self, messages: Messages, variables: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        images = images_of(messages)
        for spelt in _texts(messages):
            if mark := next((each for each in self._marks if each in spelt), None):
                raise ConfigError(
                    f"a prompt spells {mark!r}, which stands for an image in this model, in {spelt[:60]!r}; take it out, and "
                    'give an image as {"type": "image", ...}'
                )
        if not self.chat_template:
            raise ConfigError(f"model = {str(self._directory)!r} has no chat template, which writes the places of images")
        try:
            text = self.rendered(messages, variables)
        except Exception as error:  # a template is a program
            raise ConfigError(f"the model's chat template refuses {str(messages)[:80]}: {error}") from error
        if (places := text.count(self.mark)) != len(images):
            raise ConfigError(
                f"the model's chat template writes {places} places ({self.mark!r}) for {len(images)} images; "
                "use the template of a model that reads images (chat_template.jinja)"
            )
        return text, images

    def _processed(self, text: str, images: tuple[str, ...]) -> list[int]:
        """Token ids; keeps what the tower takes."""
        found = self._call(text, self.opened(images))
        ids = [int(each) for each in np.asarray(found["input_ids"]).reshape(-1)]
        self._keep(images, {name: np.asarray(each) for name, each in found.items() if name not in _OF_TEXT})
        if ids[-1] == self.place_id and text != self.mark * len(images):
            raise ConfigError(f"a prompt ends with an image, and text must follow it; it begins {text[:60]!r}")
        return ids

    def _call(self, text: str, opened: Sequence[Any]) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = self._processor(
                text=[text], images=[list(opened)], return_tensors="np", add_special_tokens=False
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
            sizes = [each.size for each in opened]
            raise ConfigError(
                f"the processor of model = {str(self._directory)!r} refuses images of {sizes}: {error}"
            ) from error
        return found

    def _keep(self, images: tuple[str, ...], arrays: Arrays) -> None:
        self._cache[images] = arrays
        self._cache.move_to_end(images)
        while len(self._cache) > 1 and sum(map(_num_bytes, self._cache.values())) > self._most_bytes:
            self._cache.popitem(last=False)

    def _expanded(self, sizes: tuple[tuple[int, int], ...]) -> int:
        """Tokens that images of these sizes add to the text with their places."""
        from PIL import Image

        text = self.mark * len(sizes)
        ids = np.asarray(self._call(text, [Image.new("RGB", size) for size in sizes])["input_ids"]).size
        return int(ids) - len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@cache
def _made_up() -> tuple[tuple[str, Any], ...]:
    """The images of `sample`, by name."""
    from PIL import Image

    random = np.random.default_rng(0)
    drawn = [Image.fromarray(random.integers(256, size=(h, w, 3)).astype(np.uint8)) for w, h in _SAMPLE]
    return tuple((f"{number:032x}", each) for number, each in enumerate(drawn))


def _texts(messages: Messages) -> Iterator[str]:
    for message in messages:
        content = message.get("content", "")
        yield from ([content] if isinstance(content, str) else [part.get("text", "") for part in content])


def _as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content as a list of parts, which templates of such models read, without what names an image."""
    content = message.get("content")
    if content is None:
        return dict(message)
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in parts]}


def _num_bytes(arrays: Arrays) -> int:
    return sum(each.nbytes for each in arrays.values())


def _processor(directory: Path) -> Any:
    """The model's own, without video, by Pillow and numpy: the same arrays wherever it runs."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if not reads_images(directory):
        raise ConfigError(f"model = {str(directory)!r} reads no images, and this run has some; use a model of images and text")
    if not any((directory / name).is_file() for name in PROCESSOR_FILES):
        raise ConfigError(
            f"model = {str(directory)!r} has no {PROCESSOR_FILES[0]}, by which images are prepared; copy it from where the "
            "model came"
        )
    kind = str(json.loads((directory / "config.json").read_text())["model_type"])
    try:
        base: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
        home: Any = sys.modules[base.__module__]
        if getattr(home, "num2words", "") is None:  # SmolVLM's asks for a package that spells how many frames a video has
            home.num2words = str
        given = {"tokenizer": from_pretrained(AutoTokenizer, directory)}
        given["image_processor"] = from_pretrained(AutoImageProcessor, directory, backend="pil")
        wanted = [given.get(name) for name in base.get_attributes()]
        with LOADING:
            made: Any = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda self, name, argument: None})
            described, _ = base.get_processor_dict(directory, local_files_only=True)
            return made.from_args_and_dict(wanted, described)
    except (KeyError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the processor of model = {str(directory)!r} ({kind}) cannot be used: {error}") from error
