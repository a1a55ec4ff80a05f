"""The pass written for Llama gives the logits of the model's own code, and is used for nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from async_rlhf.actors.torch_engine import llama
from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.forward import Forward
from async_rlhf.actors.torch_engine.llama import LlamaForward, can_serve
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.actors.torch_engine.segments import BLOCK, COST, segments

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "one-key-head": {"num_key_value_heads": 1, "head_dim": 12},
    "tied": {"tie_word_embeddings": True},
    "llama3-rotation": {"rope_parameters": LLAMA3_ROTATION},
}
NOT_SERVED = {
    "attention bias": LlamaConfig(**SMALL, attention_bias=True),
    "MLP bias": LlamaConfig(**SMALL, mlp_bias=True),
    "activation": LlamaConfig(**SMALL, hidden_act="gelu"),
    "rotation": LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    "family": Qwen2Config(**SMALL),
    "type of numbers": LlamaConfig(**SMALL, dtype="float16"),
}


def make_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and the rest away from their initial values, so that none can be left out unseen.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@torch.inference_mode()
def walk(forward: Forward, steps: int = 70) -> torch.Tensor:
    """Logits over a history with admissions, a shared prompt, a refilled row, rows at different positions, and turns that go
    on behind observations of different lengths: short ones alone, a long one, and one beside a new prompt."""
    observed = {7: {0: 3, 2: 1}, 12: {3: 40, 1: 2}, 20: {0: 5}}
    draw = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(0, 30, (n,), generator=draw).tolist()) for n in (6, 1, 9, 4)]
    tokens = torch.tensor([prompts[0][-1], prompts[0][-1], prompts[1][-1]])
    positions = torch.tensor([5, 5, 0])
    chunks = [PrefillChunk(prompts[0][:-1], 0, (0, 1))]
    seen = []
    for step in range(steps):
        if step == 3:
            chunks = [
                PrefillChunk(prompts[2][:5], 0, (1,)),
                PrefillChunk(prompts[3][:-1], 0, (3,)),
                PrefillChunk(prompts[2][5:-1], 5, (1,)),
            ]
            tokens = torch.cat((tokens, torch.tensor([prompts[3][-1]])))
            positions = torch.cat((positions, torch.tensor([3])))
            tokens[1], positions[1] = prompts[2][-1], 8
        for row, length in observed.get(step, {}).items():
            ids = torch.randint(0, 30, (length,), generator=draw).tolist()
            chunks.append(PrefillChunk((int(tokens[row]), *ids[:-1]), int(positions[row]), (row,), sampled=True))
            tokens[row], positions[row] = ids[-1], positions[row] + length
        if step == 20:
            chunks.append(PrefillChunk(prompts[2][:-1], 0, (1,)))
            tokens[1], positions[1] = prompts[2][-1], len(prompts[2]) - 1
        seen.append(forward(chunks, tokens, positions, int(positions.max()) + 1))
        chunks, positions = [], positions + 1
        tokens = torch.randint(0, 30, (len(tokens),), generator=draw)
    return torch.cat(seen)


@pytest.mark.parametrize("name", SERVED)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_code_and_in_bfloat16_nearer_to_float32(name: str) -> None:
    """Of many rows, and of one sequence beside them."""
    model = make_model(LlamaConfig(**SMALL | SERVED[name]))
    assert can_serve(model)
    forward, ids = LlamaForward(model, RowCache(4)), torch.randint(0, 30, (90,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(forward.logits(ids), model(input_ids=ids[None]).logits[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(walk(forward), walk(Forward(model, RowCache(4))), atol=1e-5, rtol=1e-5)
    half = model.bfloat16()
    assert can_serve(half)
    exact = walk(Forward(copy.deepcopy(half).float(), RowCache(4)))
    own, ours = (walk(each(half, RowCache(4))).float() - exact for each in (Forward, LlamaForward))
    assert 0 < ours.abs().mean() < own.abs().mean() and ours.abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_weights_cannot_be_packed_the_logits_are_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LlamaConfig(**SMALL)).to(dtype)
    packed = walk(LlamaForward(model, RowCache(4)))
    monkeypatch.setattr(llama, "can_pack", lambda dtype: False)
    plain = walk(LlamaForward(model, RowCache(4)))
    torch.testing.assert_close(plain, packed, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-5)


@pytest.mark.parametrize("what", NOT_SERVED)
def test_whatever_differs_from_plain_llama_is_left_to_the_models_own_code(what: str) -> None:
    assert not can_serve(AutoModelForCausalLM.from_config(NOT_SERVED[what], dtype=NOT_SERVED[what].dtype))


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=70))
def test_every_row_is_in_one_segment_that_reaches_its_token_and_all_cost_no_more_than_blocks_apart(
    positions: list[int],
) -> None:
    found = segments(positions)
    assert [row for segment in found for row in range(segment.start, segment.stop)] == list(range(len(positions)))
    for start, stop, length in found:
        assert length == max(positions[start:stop]) + 1
    blocks = [positions[start : start + BLOCK] for start in range(0, len(positions), BLOCK)]
    apart = sum(len(block) * (max(block) + 1) + COST for block in blocks)
    assert sum((stop - start) * length + COST for start, stop, length in found) <= apart
    assert segments([40] * 64) == [(0, 64, 41)] and segments([900, *[40] * 63]) == [(0, 1, 901), (1, 64, 41)]
