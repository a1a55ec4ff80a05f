"""The numbers of a model that decide its memory, from its config.json and the headers of its files. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.model_directory import tensor_shapes

TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 1 << 20


@dataclass(frozen=True)
class ModelShape:
    """parameters: of all files. mlp: width within an MLP; of a mixture, the experts of one token together. heads, key_heads:
    width of all of them."""

    parameters: int
    layers: int
    width: int
    mlp: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int) -> ModelShape:
        """config: a model's config.json. Raises KeyError where it leaves out what its family decides."""
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
        )

    @property
    def output(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.output * (1 if self.tied else 2)) // self.layers


def parameters(directory: Path) -> int:
    """Numbers in the safetensors files of a directory; 0 where there are none."""
    return sum(math.prod(shape) for path in directory.glob("*.safetensors") for shape in tensor_shapes(path).values())


def shape_of(directory: Path) -> ModelShape | None:
    """None for a file that is converted later, and for a configuration that leaves its sizes to its family."""
    with suppress(KeyError, NotADirectoryError, FileNotFoundError):
        return ModelShape.of(json.loads((directory / "config.json").read_text()), parameters(directory))
    return None


def written(size: int) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 100 * _MIB else f"{size / _MIB:.0f} MiB"
