"""The recorded experts of each position in models with mixtures of experts, and the supported families. No torch.

A router chooses some experts for each position in each mixture layer. The engine records its choice, and the learner's passes
take the same experts (rollout routing replay, Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import from_pretrained

RoutingArray = npt.NDArray[np.unsignedinteger[Any]]
"""[positions, layers, choices]: numbers of experts, uint8 or uint16."""

SOFTMAX = frozenset(("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"))
SIGMOID = frozenset(("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "solar_open"))
"""Model types whose experts are mixed by the softmax, or the sigmoids, of their logits. Their routers return logits, weights
and numbers of experts. Of others nothing is recorded."""


class Routing(NamedTuple):
    """The size of a model's routing: mixture layers, experts that a position takes in each, and experts in all."""

    layers: int
    choices: int
    experts: int


def misfit(known: Routing | None, routing: RoutingArray) -> str | None:
    """Why a recorded routing does not fit this model; None when it does."""
    if known is None:
        return "experts that are not known here"
    if (shape := routing.shape[1:]) != known[:2]:
        return f"{shape[1]} experts in each of {shape[0]} layers; the model takes {known.choices} in {known.layers}"
    largest = int(routing.max(initial=0))
    return f"expert {largest}; the model has those from 0 to {known.experts - 1}" if largest >= known.experts else None


def routing_of(config: Any) -> Routing | None:
    """The routing of a transformers configuration; None for a family that is not listed, and without experts."""
    if config.model_type not in SOFTMAX | SIGMOID:
        return None
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((number for name in names if (number := getattr(config, name, None))), 0)
    kinds = getattr(config, "mlp_layer_types", None) or ["sparse"] * config.num_hidden_layers
    dense = {*range(getattr(config, "first_k_dense_replace", None) or 0), *(getattr(config, "mlp_only_layers", None) or ())}
    step = getattr(config, "decoder_sparse_step", None) or 1
    mixed = [n for n, kind in enumerate(kinds) if kind == "sparse" and n not in dense and (n + 1) % step == 0]
    return Routing(len(mixed), config.num_experts_per_tok, count) if mixed and count else None


def read_routing(directory: Path, model_type: str) -> Routing | None:
    """The routing of the model in a directory, which is of this type."""
    if model_type not in SOFTMAX | SIGMOID:
        return None
    from transformers import AutoConfig  # slow to import, and few need it

    return routing_of(from_pretrained(AutoConfig, directory).get_text_config())


def routers(model: Any) -> list[Any]:
    """A transformers model's routers in the order of its layers. Raises ConfigError where its experts cannot be recorded."""
    config = model.config.get_text_config()
    modules = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    if {Routing(len(modules), each.top_k, each.num_experts) for each in modules} != {routing_of(config)}:
        raise ConfigError(not_recorded(str(config.model_type)))
    return modules


def not_recorded(kind: str) -> str:
    """Why `engine.replay_routing` is refused for a model type."""
    return (
        f"engine.replay_routing = true with model type {kind!r}, whose choice of experts cannot be recorded. Set it to "
        f"false, or use one of {', '.join(sorted(SOFTMAX | SIGMOID))}"
    )
