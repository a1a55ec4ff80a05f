"""A GGUF file becomes a Hugging Face directory with the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.model.gguf import model_directory

# Name in the file -> name in the model.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = 2


def interleaved(weights: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in the order the format wants: the two halves of each head in turn."""
    rows, columns = weights.shape
    return weights.reshape(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<eos>", "a", "b", "c", "ab"])
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for theirs, ours in LAYER.items():
        weights = state[f"model.layers.0.{ours}.weight"]
        writer.add_tensor(f"blk.0.{theirs}.weight", interleaved(weights) if theirs in ("attn_q", "attn_k") else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_directory_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=5,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )
    write_gguf(tmp_path / "tiny.gguf", model)
    directory = model_directory(str(tmp_path / "tiny.gguf"))
    again = LlamaForCausalLM.from_pretrained(directory)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    marker = Path(directory) / "made-once"
    marker.touch()
    assert model_directory(str(tmp_path / "tiny.gguf")) == directory
    assert marker.exists()


@pytest.mark.rest
def test_a_file_that_is_no_gguf_model_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        model_directory(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache").glob("**/config.json"))


@pytest.mark.rest
def test_the_converter_run_by_hand_ends_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_rlhf.learner.model.gguf", str(tmp_path / "none.gguf"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
