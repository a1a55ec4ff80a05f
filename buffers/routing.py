"""Which experts compute a position, in models whose layers are mixtures of them: what is recorded, of which families. No torch.

A router chooses `choices` of `experts` experts for each position in each mixture layer. The engine records its choice, and the
learner's passes take the same experts (rollout routing replay, Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import ConfigError

RoutingArray = npt.NDArray[np.unsignedinteger[Any]]
"""[positions, layers, choices]: numbers of experts."""

SOFTMAX = frozenset(("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"))
SIGMOID = frozenset(("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "solar_open"))
"""Model types whose experts are mixed by the softmax, or the sigmoids, of their logits. Their routers return logits, weights
and numbers of experts. Of others nothing is recorded."""

# As configurations call the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Routing:
    """Of a model: mixture layers, experts that a position takes in each, and experts that there are."""

    layers: int
    choices: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def position_bytes(self) -> int:
        return self.layers * self.choices * self.dtype.itemsize

    def misfit(self, routing: RoutingArray) -> str | None:
        """What of a recorded one is not of this model."""
        if (shape := routing.shape[1:]) != (self.layers, self.choices):
            return f"{shape[1]} experts in each of {shape[0]} layers; the model takes {self.choices} in {self.layers}"
        largest = int(routing.max(initial=0))
        return f"expert {largest}; the model has those from 0 to {self.experts - 1}" if largest >= self.experts else None


def has_experts(config: Any) -> bool:
    """Whether a transformers configuration is of a model with experts, of any family."""
    return bool(getattr(config, "num_experts_per_tok", None)) and any(getattr(config, name, None) for name in _EXPERTS)


def routing_of(config: Any) -> Routing | None:
    """Of a transformers configuration; None for a family that is not listed."""
    if config.model_type not in SOFTMAX | SIGMOID:
        return None
    count = next(number for name in _EXPERTS if (number := getattr(config, name, None)))
    kinds = getattr(config, "mlp_layer_types", None) or ["sparse"] * config.num_hidden_layers
    dense = {*range(getattr(config, "first_k_dense_replace", None) or 0), *(getattr(config, "mlp_only_layers", None) or ())}
    step = getattr(config, "decoder_sparse_step", None) or 1
    mixed = [n for n, kind in enumerate(kinds) if kind == "sparse" and n not in dense and (n + 1) % step == 0]
    return Routing(len(mixed), config.num_experts_per_tok, count)


def routers(model: Any) -> list[Any]:
    """Of a transformers model, in the order of its layers. Raises ConfigError where its experts cannot be recorded."""
    config = model.config.get_text_config()
    found = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    known = routing_of(config)
    if known is None or {Routing(len(found), each.top_k, each.num_experts) for each in found} != {known}:
        raise ConfigError(not_recorded(str(config.model_type)))
    return found


def not_recorded(kind: str) -> str:
    """Why `engine.replay_routing` is refused for a model type."""
    return (
        f"engine.replay_routing = true with model type {kind!r}, whose choice of experts cannot be recorded. Set it to "
        f"false, or use one of {', '.join(sorted(SOFTMAX | SIGMOID))}"
    )
