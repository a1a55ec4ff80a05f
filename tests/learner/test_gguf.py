"""A GGUF file becomes a Hugging Face directory with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.model.gguf import convert, model_directory

# Name in the file -> name in the model.
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEADS = 2


def interleaved(weights: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in the order the format wants: the two halves of each head in turn."""
    rows, columns = weights.shape
    return weights.reshape(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, layer: Mapping[str, str] = LAYER) -> None:
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": HEADS,
        "head_count_kv": HEADS,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_dimension_count": config.hidden_size // HEADS,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": ["<eos>", "a", "b", "c", "ab"],
        "token_types": [3, 1, 1, 1, 1],
        "token_merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "chat_template": "{{ messages[0].content }}",
    }.items():
        getattr(writer, f"add_{name}")(value)
    for theirs, ours in {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}.items():
        writer.add_tensor(f"{theirs}.weight", state[f"{ours}.weight"])
    for theirs, ours in layer.items():
        weights = state[f"model.layers.0.{ours}.weight"]
        writer.add_tensor(f"blk.0.{theirs}.weight", interleaved(weights) if theirs in ("attn_q", "attn_k") else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, tie_word_embeddings=False))


def test_a_gguf_file_becomes_a_directory_with_the_same_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny()
    write_gguf(tmp_path / "tiny.gguf", model)
    directory = model_directory(str(tmp_path / "tiny.gguf"))
    again = LlamaForCausalLM.from_pretrained(directory).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    (Path(directory) / "made-once").touch()
    assert model_directory(str(tmp_path / "tiny.gguf")) == directory and (Path(directory) / "made-once").exists()


def test_a_gguf_file_that_lacks_a_tensor_is_not_filled_with_random_numbers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny(), {theirs: ours for theirs, ours in LAYER.items() if theirs != "ffn_norm"})
    with pytest.raises(ConfigError, match=r"tiny.gguf cannot be read as a GGUF model: .*no tensor '.*post_attention_layernorm"):
        convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.rest
def test_a_file_that_is_no_gguf_model_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        model_directory(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache").glob("**/config.json"))
