"""Memory and speed of the engine by the length of its rows, full attention against a bounded cache, in turns.

A Llama of random weights: what is measured does not depend on what they are. Every request is completed to its full length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.kv_policy.arms import FULL, policy
from async_rlhf.experiments.kv_policy.rows import Row

_PROMPT, _SEQUENCES, _VOCABULARY = 64, 8, 512
_ARMS = (FULL, "window", "first")


def cost_rows(lengths: Sequence[int], budget: int, turns: int) -> Iterator[Row]:
    """Of each length and arm: bytes of keys and values, and tokens a second (median of the turns)."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=max(lengths), eos_token_id=None,
        )
    ).eval()  # fmt: skip
    for length in lengths:
        rates: dict[str, list[float]] = {arm: [] for arm in _ARMS}
        for _ in range(turns):
            for arm in _ARMS:
                engine, rate = _run(model, arm, budget, length)
                rates[arm].append(rate)
                if len(rates[arm]) == turns:
                    kept = length if arm == FULL else budget
                    yield Row("cost", arm, kept, length, "bytes", engine.cache_bytes)
                    yield Row("cost", arm, kept, length, "tokens_per_s", median(rates[arm]))


def _run(model: LlamaForCausalLM, arm: str, budget: int, length: int) -> tuple[TorchEngine, float]:
    ends = torch.arange(_VOCABULARY).remainder(10).eq(0).numpy()
    engine = TorchEngine(
        model, slots=_SEQUENCES, max_length=length, kv_policy=None if arm == FULL else policy(arm, budget, ends, 10)
    )
    prompts = torch.randint(_VOCABULARY, (_SEQUENCES, _PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    engine.submit(
        [
            Request(RolloutKey(number, 0, 0), tuple(prompt), length - _PROMPT, Sampling(), number)
            for number, prompt in enumerate(prompts)
        ]
    )
    began = time.perf_counter()
    while engine.num_unfinished:
        engine.step()
    return engine, engine.num_sampled / (time.perf_counter() - began)
