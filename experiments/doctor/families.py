"""Tiny random models of any family, made without a network; windows and chunks are shorter than what is sampled from them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

WINDOW = 8
# Whatever a family calls it; each is set where its configuration has it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("attention_chunk_size", "window_size"), WINDOW),
    "vocab_size": 64, "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWED = {"sliding_window": WINDOW}
_SOME_WINDOWED = {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}
# None: the family does not take it.
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None, "new_decoder_architecture": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    **dict.fromkeys(("mistral", "mixtral", "starcoder2", "phi3", "phimoe"), _WINDOWED),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), _SOME_WINDOWED),
}


def config(kind: str, **own: Any) -> PretrainedConfig:
    made = CONFIG_MAPPING[kind]()
    known = {name: value for name, value in _SIZES.items() if hasattr(made, name)}
    if getattr(made, "sliding_window", None) is not None:
        known |= _WINDOWED
    known |= _OWN.get(kind, {}) | own
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items() if value is not None}
    return CONFIG_MAPPING[kind](**plain)


def experts(kind: str, count: int, choices: int) -> dict[str, int]:
    """Settings of a family with so many experts, of which a position takes so many; whatever the family calls them."""
    names = (name for name in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(config(kind), name))
    groups = {"n_group": 4, "topk_group": 2} if kind == "deepseek_v3" else {}
    return {**dict.fromkeys(names, count), "num_experts_per_tok": choices, **groups}


@cache
def model(kind: str, **own: Any) -> PreTrainedModel:
    """In float32, with weights large enough that every token depends on what it attends to. Not to be changed."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(kind, **own), trust_remote_code=False).float().eval()
    for weights in made.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    return made


def plain_logprobs(of: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """float32 [T]: log-probability of each token of a completion, from one pass over this text alone."""
    ids = torch.tensor([[*prompt, *completion]], device=of.device)
    logits = of(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
