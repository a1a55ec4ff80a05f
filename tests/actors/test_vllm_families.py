"""Real vLLM samples what plain passes of other families say, beyond their windows as well."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.vllm_model import SHIPPED

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
# Sizes that its kernels know.
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
OWN: dict[str, dict[str, Any]] = {  # beside llama, which `conformance` serves
    "qwen3": {"use_sliding_window": False},
    "mistral": {},
    "gemma3_text": {"layer_types": ("sliding_attention", "full_attention")},
}


@pytest.mark.parametrize("kind", OWN)
def test_sampled_log_probabilities_are_those_of_plain_passes(kind: str, tmp_path: Path) -> None:
    from async_rlhf.actors.vllm_engine.loading import load_engine

    model = families.model(kind, **SIZES, **OWN[kind])
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path / name)
    engine = load_engine(str(tmp_path), EngineConfig(kind="vllm", slots=4), version=0)
    try:
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(3, 40, length).tolist()) for length in (5, 19, 30)]
        requests = [Request(RolloutKey(0, 0, at), prompt, 20, Sampling(), seed=at) for at, prompt in enumerate(prompts)]
        engine.submit(requests)
        ended = {}
        while engine.num_unfinished:
            ended |= {completion.key: completion for completion in engine.step()}
    finally:
        engine.close()
    for request in requests:
        completion = ended[request.key]
        plain = families.plain_logprobs(model, list(request.prompt_ids), completion.token_ids.tolist()).detach()
        np.testing.assert_allclose(completion.logprobs, plain.numpy(), rtol=0, atol=1e-4)
