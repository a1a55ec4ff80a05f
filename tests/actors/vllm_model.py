"""The model that vLLM's tests serve: the shipped tokenizer, random weights so large that a wrong cache or mask shows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from async_rlhf.actors.engine import Request
from async_rlhf.buffers.record import Float32Array, Int32Array
from async_rlhf.buffers.tensors import RawTensor

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"
END = 1


def make_model(seed: int) -> PreTrainedModel:
    """Random weights of the shipped architecture, which end a completion after about a hundred tokens.

    They are the same numbers in float32 and in bfloat16.
    """
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(SHIPPED)
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.lm_head.weight[END] = 0.0
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def save_model(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SHIPPED / name, directory / name)
    return directory


def raw_weights(model: PreTrainedModel, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, RawTensor]:
    words = {"float32": torch.int32, "bfloat16": torch.int16}[dtype]
    return {
        name: RawTensor(
            dtype, tuple(parameter.shape), parameter.detach().to(getattr(torch, dtype)).view(words).numpy().tobytes()
        )
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Int32Array, temperature: float = 1.0) -> Float32Array:
    """The oracle: float32 [T] of int32 [T] tokens after the prompt, from one plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / temperature, dim=-1)
    return np.asarray(table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy(), np.float32)


def expected_logprobs(model: PreTrainedModel, request: Request, tokens: Int32Array) -> Float32Array:
    return plain_logprobs(model, request.prefix_ids, tokens, request.sampling.temperature or 1.0)
