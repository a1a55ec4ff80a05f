"""The attention pattern of each layer of a model, and the longest text it can take, read from its configuration. No torch.

Learner, reference and torch engine make their masks from this. A family is listed when its layers keep nothing but keys and
values, and attend to all before, to a window, or to a chunk, by `layer_types` or `sliding_window`; each is held to plain
passes by `tests/families`. Of others nothing is assumed: the learner computes one completion a row without a mask of its own,
which is what any causal model is made for, and the torch engine refuses them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

FAMILIES = frozenset((
    "afmoe", "apertus", "arcee", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "jetmoe", "llama",
    "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm",
))  # fmt: skip
"""Model types, as `config.json` names them."""

# The text of models that read images, where it is no family by itself.
_OF_IMAGES = frozenset(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"))

# Limits of the check of a model at the start of a run: parameters x tokens of a text, and logits of a plain pass (tokens x
# vocabulary).
_WORK, _LOGITS = 1 << 38, 1 << 26
_SHORTEST, _USUAL = 12, 64

# Angles that depend on how long the longest text of a pass is, beyond the length the model was first trained for.
_LENGTH_DEPENDENT = ("dynamic", "longrope")

T = TypeVar("T")


@dataclass(frozen=True)
class Reach:
    """How far back a layer attends; without both limits, to the beginning."""

    window: int | None = None
    """A number of positions, its own included."""
    chunk: int | None = None
    """Back to the last multiple of this number."""

    def covers(self, query: Any, key: Any) -> Any:
        """Whether a layer looks back from one position to the other, of tensors that broadcast; True where it looks back to the
        beginning."""
        seen: Any = True
        if self.window is not None:
            seen = query < key + self.window
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen


FULL = Reach()


@dataclass(frozen=True)
class Attention:
    """The reach of each layer type; under `""` where the model takes one mask for all of its layers."""

    reaches: Mapping[str, Reach]

    def masks(self, make: Callable[[Reach], T]) -> T | dict[str, T]:
        """The model's `attention_mask` argument: one mask, or one by layer type."""
        if "" in self.reaches:
            return make(self.reaches[""])
        return {kind: make(reach) for kind, reach in self.reaches.items()}

    @property
    def window(self) -> int | None:
        """The shortest reach, None where every layer sees all."""
        return min((limit for each in self.reaches.values() for limit in (each.window, each.chunk) if limit), default=None)


def attention(config: Mapping[str, Any]) -> Attention | None:
    """The attention of a complete configuration (`PretrainedConfig.to_dict()`); None for a family that is not listed."""
    if config.get("model_type") not in FAMILIES | _OF_IMAGES or config.get("alibi"):
        return None
    window, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    kinds = {"full_attention": FULL, "sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    if not (types := config.get("layer_types")):
        return Attention({"": Reach(window=window)})
    return Attention({kind: kinds[kind] for kind in sorted(set(types))}) if set(types) <= set(kinds) else None


def unknown(kind: str) -> str:
    """Why the torch engine refuses a model type."""
    return (
        f"model type {kind!r}: the torch engine keeps keys and values of each position, and this family is not known to need "
        f"nothing else. Set engine.kind = 'vllm', or use one of {', '.join(sorted(FAMILIES))}"
    )


def attends_by_name(model: Any) -> bool:
    """Whether a transformers model attends by torch's function, which it looks up by name: then another may take its place."""
    by_torch: bool = model.config.get_text_config()._attn_implementation == "sdpa"
    return by_torch and model._can_set_attn_implementation()


def attend_by(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Let the code of a transformers model attend by this function, known by that name, in place; with masks as torch's has."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


def cache_argument(model: Any) -> str:
    """The name of a transformers model's cache argument: `cache`, before 5.24 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def max_length(config: Mapping[str, Any]) -> int | None:
    """Longest text that the model can take without its numbers depending on other texts of the pass; None for no limit."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    return min(filter(None, (_tokens(positions), angle_limit(config))), default=None)


def _tokens(limit: Any) -> int | None:
    """The limit in a configuration file; None for each spelling of no limit: null, 0, infinity, a value that is no number."""
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    return int(limit) if is_number and 0 < limit < math.inf else None


def probe_length(num_parameters: int, vocabulary: int, attention: Attention | None, longest: int | None) -> int:
    """Length of the text that checks a model: longer than its window where that is affordable, at most `longest`."""
    affordable = min(_WORK // max(1, num_parameters), _LOGITS // vocabulary)
    window = attention.window if attention is not None else None
    length = max(_SHORTEST, min(max(_USUAL, (window or 0) + 16), affordable))
    return min(length, longest or length)


def angle_limit(config: Mapping[str, Any]) -> int | None:
    """Longest text whose angles (rotary positions) do not depend on the texts beside it, where they can."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [scaling, *(each for each in scaling.values() if isinstance(each, Mapping))]
    if not any(each.get("rope_type", each.get("type")) in _LENGTH_DEPENDENT for each in kinds):
        return None
    lengths = [each.get("original_max_position_embeddings") for each in kinds]
    lengths += [config.get("original_max_position_embeddings"), config.get("max_position_embeddings")]
    return next(filter(None, map(_tokens, lengths)), None)
