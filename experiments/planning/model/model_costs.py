"""The sizes of a language model: parameters, FLOPs and key-value cache, from its `config.json` alone.

Bytes are those of bfloat16 weights. Sliding windows are not taken off: where a model has them, attention and cache are upper
bounds beyond the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError, did_you_mean

_WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class _Family:
    """In what the families differ, where a configuration leaves it out. head_dim 0: hidden size by heads."""

    head_dim: int = 0
    tied: bool = False
    qkv_bias: bool = False
    query_key_norms: bool = False
    norms: int = 2
    experts: str = ""
    expert_width: str = "intermediate_size"


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_dim=128, query_key_norms=True),
    "gemma": _Family(head_dim=256, tied=True),
    "gemma2": _Family(head_dim=256, tied=True, norms=4),
    "gemma3_text": _Family(head_dim=256, tied=True, query_key_norms=True, norms=4),
    "mixtral": _Family(experts="num_local_experts"),
    "qwen3_moe": _Family(query_key_norms=True, experts="num_experts", expert_width="moe_intermediate_size"),
}


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Sizes of a decoder with grouped-query attention and gated MLPs; `read` makes one. experts 0: a dense model."""

    layers: int
    hidden: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    active_experts: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norms: bool
    norms: int

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's queries, keys, values and output."""
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (queries + 2 * kv) * self.qkv_bias + self.hidden * self.output_bias
        return 2 * self.hidden * queries + 2 * self.hidden * kv + biases + 2 * self.head_dim * self.query_key_norms

    def mlp_parameters(self, experts: int) -> int:
        """Parameters of one layer's router and so many of its experts; of a dense one: gate, up, down."""
        one = 3 * self.hidden * self.mlp_width + (2 * self.mlp_width + self.hidden) * self.mlp_bias
        return one * experts + self.hidden * self.experts if self.experts else one

    def _parameters(self, experts: int) -> int:
        layer = self.attention_parameters + self.mlp_parameters(experts) + self.norms * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Each number that is trained, once: a tied head is the embedding."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, where it meets only some of the experts."""
        return self._parameters(self.active_experts)

    def forward_flops(self, context: float, *, head: bool = True) -> float:
        """FLOPs of one token that attends to `context` tokens: 2 a weight that it meets, and 4 · heads · head_dim · c a layer.

        C_f(c) = 2L(d·(2q + 2kv) + 3·d·d_ff·k + d·E) + 4L·q·c + 2Vd, with q and kv the widths of queries and of keys, k the
        active experts and E the router's width (0 in a dense model): Kaplan et al., arXiv 2001.08361, table 1, for grouped
        attention and gated MLPs. Norms, biases and the softmax are left out. Over a causal prompt of S tokens the mean
        context is (S + 1) / 2. head: False for a model that gives a score in place of logits.
        """
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 2 * self.hidden * (queries + kv)
        mlp = 3 * self.hidden * self.mlp_width * max(self.active_experts, 1) + self.hidden * self.experts
        layer = 2 * (projections + mlp) + 4 * queries * context
        return self.layers * layer + (2 * self.vocabulary * self.hidden if head else 0)

    def sequence_flops(self, tokens: int, *, head: bool = True) -> float:
        """The forward pass of a causal sequence: the sum of `forward_flops` over contexts 1 to `tokens`."""
        return tokens * self.forward_flops((tokens + 1) / 2, head=head) if tokens else 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16: 2 · 2 · L · kv_heads · head_dim (Pope et al., arXiv 2211.05102, section 3.3)."""
        return 2 * _WEIGHT_BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        return _WEIGHT_BYTES * self.parameters


def read(config: Mapping[str, object]) -> ModelCosts:
    """From the content of a `config.json`. Raises ConfigError for unknown families, and for keys that are missing or wrong."""
    name = str(config.get("model_type", ""))
    family = _FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"the costs of model_type = {name!r} are not known; {did_you_mean(name, _FAMILIES)}")
    if family.experts and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ConfigError(f"a {name} model with layers of its own without experts: costs are known where all layers have them")
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    # A config may leave these out: the family then has its own value, or one that follows from the others.
    kv_heads = _whole(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    given = _whole(config, "head_dim") if config.get("head_dim") is not None else family.head_dim
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}")
    experts = _whole(config, family.experts) if family.experts else 0
    active = _whole(config, "num_experts_per_tok") if experts else 0
    if active > experts:
        raise ConfigError(f"num_experts_per_tok = {active} of {experts} experts; at most {experts}")
    return ModelCosts(
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        mlp_width=_whole(config, family.expert_width),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=given or hidden // heads,
        vocabulary=_whole(config, "vocab_size"),
        experts=experts,
        active_experts=active,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=bool(config.get("attention_bias", family.qkv_bias)),
        output_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        query_key_norms=family.query_key_norms,
        norms=family.norms,
    )


def _whole(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} of the model's config.json is {value!r}: it must be a whole number of 1 or more")
    return value
