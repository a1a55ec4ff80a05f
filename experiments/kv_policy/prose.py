"""What a pretrained model makes of prose with a part of its cache: one masked pass a text, which is what the engine computes.

The texts are the language reference that every CPython brings (`pydoc_data.topics`): English, public, and the same for all.

Axes: `T` tokens of a text, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from async_rlhf.actors.config import KVConfig
from async_rlhf.actors.torch_engine.chunks import additive
from async_rlhf.actors.torch_engine.kv_policy import KVPolicy, ending
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.experiments.kv_policy.arms import ARMS, FULL, policy, usual_chunk
from async_rlhf.experiments.kv_policy.rows import Row


def prose_rows(model_dir: Path, budgets: Sequence[int], num_texts: int, length: int) -> Iterator[Row]:
    """Of each text, arm and budget: nats a token of the text, and the divergence from full attention, over the tokens before
    which something was evicted by the largest budget."""
    model = from_pretrained(AutoModelForCausalLM, model_dir, dtype=torch.float32).eval()
    tokenizer = from_pretrained(AutoTokenizer, model_dir)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    ends = ending(texts, KVConfig().ends)
    for number, ids in enumerate(_texts(tokenizer, num_texts, length)):
        interval, begin = usual_chunk(ids, ends), max(budgets)
        full = _logprobs(model, ids, None)[begin:]
        yield Row("prose", FULL, length, number, "nll", _nll(full, ids[begin + 1 :]))
        for budget in budgets:
            for arm in ARMS:
                kept = _logprobs(model, ids, policy(arm, budget, ends, interval))[begin:]
                divergence = float((kept.exp() * (kept - full)).sum(dim=-1).mean())
                yield Row("prose", arm, budget, number, "nll", _nll(kept, ids[begin + 1 :]))
                yield Row("prose", arm, budget, number, "kl", divergence)


def _texts(tokenizer: object, count: int, length: int) -> Iterator[list[int]]:
    """The longest topics, cut at so many tokens."""
    for name in sorted(topics, key=lambda each: len(topics[each]), reverse=True)[:count]:
        yield tokenizer(topics[name])["input_ids"][:length]  # type: ignore[operator]


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, ids: Sequence[int], kept: KVPolicy | None) -> torch.Tensor:
    """[T - 1, V]"""
    mask = None if kept is None else additive(torch.from_numpy(kept.mask(np.array(ids[:-1])))[None, None], model.dtype)
    logits = model(input_ids=torch.tensor([ids[:-1]]), attention_mask=mask, use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _nll(logprobs: torch.Tensor, ids: Sequence[int]) -> float:
    return float(-logprobs.gather(1, torch.tensor(ids)[:, None]).mean())
