"""How much memory each process of a run takes on its device, estimated from the configuration and the model's shape. Pure.

A learner's is counted at its peak: in the backward pass of a micro-batch, while gradients of those before it are held. It is
what tests measure of `Policy` on made-up tensors, within 15 %; of ZeRO, engines and scorers it is arithmetic. A process of an
environment is counted as one that imports nothing heavy. Not counted: what an allocator keeps in pieces that are too small.

Axes of the sums: T padded tokens of a micro-batch, D width, I width within an MLP, H all query heads, K all key heads,
V vocabulary, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.config import EngineConfig, GenerationConfig
from async_rlhf.learner.config import FLOAT32_BYTES, LOGITS_MIB, LearnerConfig, chunk_tokens

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 1 << 20
# A CUDA process before its first tensor: the driver's context, and kernels that are loaded.
CONTEXT = 512 * _MIB
# A process of an environment and its guard before the environment's own imports: what they share with no other process.
EPISODES = 27 * _MIB
# What vLLM takes of a GPU when nothing is set (0.32).
VLLM_SHARE = 0.92
# Elements that DeepSpeed reduces at once, twice (`learner.step.deepspeed_machine`).
_REDUCED = 2 * 50_000_000

Parts = Mapping[str, int]
"""Bytes by what they hold."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides its memory. parameters: of all files. mlp: of a mixture, the experts of one token together."""

    parameters: int
    layers: int
    width: int
    mlp: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int) -> Shape:
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


def learner(config: LearnerConfig, shape: Shape, generation: GenerationConfig, *, reference: bool) -> Parts:
    """Of one rank. reference: a frozen copy of the model is held beside the one that learns."""
    deepspeed, ranks = config.backend == "deepspeed", config.ranks // config.tensor_parallel
    learning = _adapters(config, shape) if config.lora.rank else shape.parameters
    held = _BYTES[config.dtype] if deepspeed else 4

    def share(stage: int) -> int:
        return ranks if deepspeed and config.zero_stage >= stage else 1

    parts = {
        "weights": held * shape.parameters // share(3),
        "gradients": held * learning // share(2) + (4 * _REDUCED if deepspeed else 0),
        "optimizer": 12 * learning // ranks if deepspeed else 8 * learning,  # DeepSpeed's has a float32 copy of the weights
    }
    parts = {name: size // config.tensor_parallel for name, size in parts.items()}
    tokens = _tokens(config, generation) // config.sequence_parallel
    parts["activations"] = _passing(config, shape, tokens)
    chunk = FLOAT32_BYTES * shape.vocabulary * chunk_tokens(shape.vocabulary, config.device)
    parts["logits"] = LOGITS_MIB * _MIB + 4 * chunk
    if config.critic.kind == "model":
        trunk = shape.parameters - (0 if shape.tied else shape.output)
        parts["critic"] = 16 * trunk // share(1) + shape.layers * _layer(config, shape, tokens)
    if reference:
        sharing = config.ranks if share(3) > 1 else 1  # also the ranks of a tensor-parallel group
        parts["reference"] = _BYTES[config.reference_dtype] * shape.parameters // sharing
    return parts


def _tokens(config: LearnerConfig, generation: GenerationConfig) -> int:
    """Of the largest micro-batch: a row is never cut."""
    longest = generation.max_prompt_length + generation.longest_completion
    group = generation.max_prompt_length + generation.group_size * generation.longest_completion
    return max(config.micro_batch_tokens, longest, min(config.row_tokens, group))


def _passing(config: LearnerConfig, shape: Shape, tokens: int) -> int:
    """What forward and backward pass hold at most, beside weights, gradients and logits."""
    half = config.dtype == "bfloat16"
    width = max(config.row_tokens, tokens if config.micro_batch_tokens < tokens else 0)
    masks = 4 * tokens * min(width, tokens)
    layer, inputs = _layer(config, shape, tokens), 4 * tokens * shape.width
    # autocast keeps its copies of the weights to the end of the forward pass, and products keep them for the backward
    copied = 2 if half and config.backend == "torch" else 0
    copies = copied * (shape.parameters - shape.output * (1 if shape.tied else 2))
    # gradients of one layer's states, and beside them that of a tied output layer, which waits for the embedding's
    learns_output = not config.lora.rank
    tied = 4 * shape.output if shape.tied and learns_output else 0
    through = 3 * _BYTES[config.dtype] * tokens * shape.mlp + tied
    output = (4 * shape.output if learns_output else 0) + 2 * copied * shape.output
    if config.gradient_checkpointing:
        kept = masks + shape.layers * inputs
        one = layer + copied * shape.layer
        return max(kept + copies, kept + output, kept + one + through, 3 * tied)
    kept = masks + shape.layers * layer + copies
    return max(kept + output, kept + through, 3 * tied)  # at its end two gradients of one embedding, and their sum


def _layer(config: LearnerConfig, shape: Shape, tokens: int) -> int:
    """What the backward pass finds again of one layer: two norms, attention with keys repeated to all heads, a gated MLP with
    three products. Residuals and norms are float32, what products take has the type they are computed in."""
    d, h, k, i = shape.width, shape.heads, shape.key_heads, shape.mlp
    if config.dtype == "bfloat16":
        return tokens * (26 * d + 14 * h + 6 * k + 8 * i)
    return tokens * (24 * d + 24 * h + 8 * k + 16 * i)


def _adapters(config: LearnerConfig, shape: Shape) -> int:
    """Parameters of adapters on every linear layer."""
    d, h, k, i = shape.width, shape.heads, shape.key_heads, shape.mlp
    return config.lora.rank * shape.layers * (7 * d + 2 * h + 2 * k + 3 * i)


def engine(config: EngineConfig, shape: Shape, generation: GenerationConfig, most: int | None, *, holds: bool) -> Parts:
    """Of one engine, on each of its devices. most: bytes it may take, for vLLM on CUDA, which takes all. holds: with several
    turns a completion, between which the torch engine holds keys and values of as many tokens as its rows have room for."""
    size, spread = _BYTES[config.dtype], 1
    if config.kind == "vllm":
        spread = config.vllm.tensor_parallel_size
    weights = size * shape.parameters // spread
    token = 2 * shape.layers * shape.key_heads * size // spread
    longest = -(-(generation.max_prompt_length + generation.longest_completion) // 16) * 16
    if config.kind == "vllm" and config.kv_bytes is None:
        room = 1 << 30 if config.device == "cpu" else (most or 0) - weights - CONTEXT
        return {"weights": weights, "keys and values": max(token * longest, room)}
    working = size * config.prefill_tokens * (8 * shape.width + 3 * shape.mlp) + 3 * 4 * config.slots * shape.vocabulary
    columns = longest if config.kv_budget is None else config.kv_budget + 1
    limit = config.slots * columns * token if config.kv_bytes is None else config.kv_bytes
    held = {"held between turns": limit} if holds and config.kind == "torch" else {}
    return {"weights": weights, "keys and values": limit, **held, "activations": working}


def judge(parameters: int, dtype: str, cache_bytes: int) -> Parts:
    """Of a reward model, or of the reference as a stage."""
    return {"weights": _BYTES[dtype] * parameters, "keys and values": cache_bytes}


def written(size: int) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 100 * _MIB else f"{size / _MIB:.0f} MiB"
