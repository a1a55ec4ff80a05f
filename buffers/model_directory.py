"""Model directories: loaded one at a time, never with code of their own; how large one is; what is refused before a run."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_rlhf.buffers.errors import ConfigError

INDEX = "model.safetensors.index.json"
"""The index of tensors by file, in a directory with several weight files."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""One of them says how a model's images are prepared."""
# The files' names for what reads images, in each family.
_TOWER = re.compile("visual|vision|projector|connector|image_newline")
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADING = threading.RLock()
"""Held while a model is made. transformers then replaces methods of its classes and torch's default type for the whole process:
of two threads that load at once, one would leave parameters untied for good."""


def from_pretrained(kind: Any, directory: Path, **options: Any) -> Any:
    """`kind.from_pretrained`: a configuration, tokenizer or model of a transformers class. Raises its errors."""
    with LOADING:
        return kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **options)


def load_whole(kind: Any, directory: Path, **options: Any) -> Any:
    """A model by `from_pretrained`. Raises ConfigError where its files lack a tensor, or have one of another shape, in whose
    place random numbers would stand; and as `check_numbers`."""
    model, report = from_pretrained(kind, directory, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ConfigError(
            f"its files have no tensor {wrong[0]!r} of the shape in config.json ({len(wrong)} such tensors); "
            "copy the model again from its source"
        )
    if "gguf_file" not in options:  # which says of each tensor how it is packed
        check_numbers(directory)
    return model


def reads_images(directory: Path) -> bool:
    """Whether transformers knows the model as one of images and text."""
    described = _described(directory / "config.json")
    if "vision_config" not in described:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # as slow, and few need it

    return described.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def model_type(directory: Path) -> str:
    """Its family, as transformers names it; empty where nothing says so."""
    return str(_described(directory / "config.json").get("model_type", ""))


def prepares_images(directory: Path) -> bool:
    """Whether it is such a model, and says how its images are prepared."""
    return reads_images(directory) and any((directory / name).is_file() for name in PROCESSOR_FILES)


def language_model(directory: Path) -> Any:
    """The transformers class that loads the model: with what reads images where it has that and a processor, or comes in no
    other way."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_whole = prepares_images(directory) or (reads_images(directory) and not is_text_alone(directory))
    return AutoModelForImageTextToText if is_whole else AutoModelForCausalLM


def is_text_alone(directory: Path) -> bool:
    """Whether transformers loads the model's text part by itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return _described(directory / "config.json").get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from a safetensors file's header. Raises OSError and SafetensorError, also for a truncated file."""
    with safe_open(path, framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping


@dataclass(frozen=True)
class TowerShape:
    """The sizes of what reads a model's images that decide its memory."""

    parameters: int
    layers: int
    width: int
    mlp: int
    deeper: int
    """Vectors that an image's place has for layers of the decoder, beside the one it begins with."""

    @classmethod
    def of(cls, vision: Mapping[str, Any], parameters: int) -> TowerShape:
        """vision: the `vision_config` of a config.json. Raises KeyError as `ModelShape.of`."""
        width = int(vision["hidden_size"])
        return cls(
            parameters=parameters,
            layers=int(vision.get("num_hidden_layers") or vision["depth"]),
            width=width,
            mlp=int(vision.get("intermediate_size") or 4 * width),
            deeper=len(vision.get("deepstack_visual_indexes") or ()),
        )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide its memory."""

    parameters: int
    """Number in all files."""
    layers: int
    width: int
    mlp: int
    """Width; of a mixture, that of the experts of one token together."""
    heads: int
    """Width of all of them."""
    key_heads: int
    """Width of all of them."""
    vocabulary: int
    tied: bool
    tower: TowerShape | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int, tower: int = 0) -> ModelShape:
        """config: a model's config.json; tower: those of its parameters that read images. Raises KeyError where it leaves out
        what its family decides."""
        text = {**config, **config.get("text_config", {})}
        width = int(text.get("hidden_size") or text["n_embd"])
        heads = int(text.get("num_attention_heads") or text["n_head"])
        head = int(text.get("head_dim") or width // heads)
        experts = int(text.get("num_experts_per_tok") or 1)
        mlp = text.get("moe_intermediate_size") or text.get("intermediate_size") or text.get("n_inner") or 4 * width
        return cls(
            parameters=parameters,
            layers=int(text.get("num_hidden_layers") or text["n_layer"]),
            width=width,
            mlp=int(mlp) * experts,
            heads=heads * head,
            key_heads=int(text.get("num_key_value_heads") or heads) * head,
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", False)),
            tower=TowerShape.of(config["vision_config"], tower) if tower else None,
        )

    @property
    def decoder(self) -> int:
        """Parameters without those of a tower."""
        return self.parameters - (self.tower.parameters if self.tower else 0)

    @property
    def output(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.decoder - self.output * (1 if self.tied else 2)) // self.layers


def parameters(directory: Path, named: re.Pattern[str] = re.compile("")) -> int:
    """Numbers in the safetensors files of a directory, of tensors that are `named` so; 0 where there are none."""
    shapes = (each for path in directory.glob("*.safetensors") for each in tensor_shapes(path).items())
    return sum(math.prod(shape) for name, shape in shapes if named.search(name))


def shape_of(directory: Path) -> ModelShape | None:
    """None for a file that is converted later, and for a configuration that leaves its sizes to its family."""
    with suppress(KeyError, NotADirectoryError, FileNotFoundError):
        tower = parameters(directory, _TOWER) if reads_images(directory) else 0
        return ModelShape.of(json.loads((directory / "config.json").read_text()), parameters(directory), tower)
    return None


def check_numbers(directory: Path) -> None:
    """Raises ConfigError for weights of 8 bits or whole numbers that nothing says how to unpack: they would be taken as they
    are, without their scales; and for a damaged file."""
    if json.loads((directory / "config.json").read_text()).get("quantization_config"):
        return
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model file {str(path)!r} cannot be used: {error}. Copy it again from its source") from error
        for name, kind in kinds.items():
            if kind.startswith(("I8", "F8_", "F6_", "F4")) or (kind[0] in "IU" and name.endswith("weight")):
                raise ConfigError(
                    f"model file {str(path)!r} cannot be used: tensor {name!r} is of type {kind}, and config.json has no "
                    "quantization_config to unpack it; give the model in float32, bfloat16 or float16"
                )


def check_language_model(directory: Path, where: str) -> None:
    """Raises ConfigError as `check_own_code`, and for a model that reads more than text and images, and whose text part is not
    loaded alone."""
    check_own_code(directory, where)
    described = _described(directory / "config.json")
    if not described.keys() & {"text_config", "vision_config"}:
        return
    if not (reads_images(directory) or is_text_alone(directory)):
        kind = str(described.get("model_type"))
        raise ConfigError(
            f"{where} = {str(directory)!r} is of model type {kind!r}, which reads more than text and images, and transformers "
            "cannot load it as a language model (AutoModelForCausalLM). Save its language model alone, or choose another"
        )


def check_own_code(directory: Path, where: str) -> None:
    """Raises ConfigError for a model or tokenizer that only its own code could load, and for one with an adapter beside it,
    which some that load it add and others do not. where: what names the directory."""
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f'{where} = {str(directory)!r} has an adapter (adapter_config.json). Merge it: python -c "from peft import '
            f"AutoPeftModelForCausalLM as M; M.from_pretrained('{directory}').merge_and_unload().save_pretrained('merged')\", "
            "copy the tokenizer's files there, and give that directory; or remove the adapter's files"
        )
    if not any(map(_brings_code, (directory / "config.json", directory / "tokenizer_config.json"))):
        return
    from transformers import AutoConfig, AutoTokenizer  # slow to import, and few need it

    kinds = [AutoConfig] + [AutoTokenizer] * (directory / "tokenizer_config.json").is_file()
    for kind in kinds:
        try:
            from_pretrained(kind, directory)
        except ValueError as error:
            raise ConfigError(
                f"{where} = {str(directory)!r} needs its own code (auto_map), which is never run; use a model that "
                f"transformers knows by itself ({kind.__name__}: {str(error)[:120]})"
            ) from error


def _brings_code(file: Path) -> bool:
    return bool(_described(file).get("auto_map"))


def _described(file: Path) -> dict[str, Any]:
    """Empty for one that is not there or cannot be read: that is found where it is needed."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def check_stop_strings(stop: Sequence[str], model: Path) -> None:
    """Raises ConfigError for one that no completion of the model in this directory will ever show.

    stop: those of `generation.stop` and of the rewards' `stop_when` together.
    """
    for text in stop:
        if shorter := next((other for other in stop if other != text and other in text), None):
            raise ConfigError(
                f"stop string {text!r} is never reached: {shorter!r} is a part of it and ends the completion first. They come "
                "from generation.stop and from stop_when of the rewards; leave one of them out"
            )
    for token in _special_tokens(model):
        if hidden := next((text for text in stop if token in text), None):
            raise ConfigError(
                f"stop string {hidden!r} never comes: {token!r} is a special token of the model, and completions leave "
                "special tokens out. End tokens end a completion anyway; choose a text that the model writes"
            )


def _special_tokens(model: Path) -> list[str]:
    """The special tokens of `tokenizer.json`, which are no text; none where there is no such file (another tokenizer)."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return []
    added = json.loads(file.read_text()).get("added_tokens") or []
    return [str(token["content"]) for token in added if token.get("special")]
