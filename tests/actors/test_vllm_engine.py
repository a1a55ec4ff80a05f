"""What is particular to vLLM behind the seam; what every engine must do is in `conformance`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.torch_models import finished
from tests.actors.vllm_model import expected_logprobs, make_model, plain_logprobs, raw_weights, save_model

# vLLM and what it imports warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-4
FIRST, SECOND = make_model(0), make_model(1)
LONG = tuple(n % 90 + 5 for n in range(400))  # three blocks of vLLM's cache


@pytest.fixture
def engine(vllm_engine: Any) -> Iterator[Any]:
    """Idle, serving version 0 with the weights of FIRST."""
    vllm_engine.on_update = "keep"
    if vllm_engine.version != 0:
        vllm_engine.load_weights(0, raw_weights(FIRST))
    yield vllm_engine
    vllm_engine.abort([RolloutKey(n, 0, 0) for n in range(100)])


def request(number: int, num_new: int = 20, temperature: float = 1.0) -> Request:
    return Request(RolloutKey(number, 0, 0), LONG, num_new, Sampling(temperature=temperature), number)


def test_a_cached_prompt_of_other_weights_is_never_reused_though_versions_repeat(engine: Any) -> None:
    for version, model in ((1, SECOND), (2, FIRST), (1, FIRST), (2, SECOND)):
        engine.load_weights(version, raw_weights(model))
        for number in range(2):  # the second finds the first one's prompt
            asked = request(number)
            completion = finished(engine, [asked])[asked.key]
            expected = expected_logprobs(model, asked, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
            assert [(span.version, span.cache_version) for span in completion.spans] == [(version, None)]


def test_weights_reach_vllm_in_memory_that_has_no_name(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt, files = engine._adopt, list[Path]()
    monkeypatch.setattr(
        engine, "_adopt", lambda version, index, *rest: (files.append(Path(index).resolve()), adopt(version, index, *rest))[1]
    )
    engine.load_weights(1, raw_weights(SECOND))
    assert engine.version == 1
    # Not even while vLLM reads it: an actor that is killed meanwhile leaves nothing.
    (file,) = files
    assert not file.exists() and file.name == "memfd:weights (deleted)"


def test_a_probe_does_not_wait_for_a_free_slot(engine: Any) -> None:
    engine.submit([request(n, num_new=100) for n in range(64)])  # twice the slots
    tokens = np.array(LONG[1:], np.int32)
    np.testing.assert_allclose(engine.probe(LONG), plain_logprobs(FIRST, LONG[:1], tokens), atol=TOLERANCE)
    assert engine.num_unfinished == 64


def test_a_temperature_that_vllm_would_change_is_refused(engine: Any) -> None:
    with pytest.raises(EngineError, match=r"0 \(greedy\) or at least 0\.01"):
        engine.submit([request(0, temperature=0.001)])


# Sizes that vLLM's kernels know; beside llama, which `conformance` serves.
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"use_sliding_window": False, "tie_word_embeddings": True},
    "mistral": {},
    "gemma3_text": {"layer_types": ("sliding_attention", "full_attention")},
}


@pytest.mark.rest
@pytest.mark.parametrize("kind", OWN)
def test_other_families_are_sampled_as_plain_passes_say_beyond_their_windows_of_new_weights_too(
    kind: str, tmp_path: Path
) -> None:
    loading = pytest.importorskip("async_rlhf.actors.vllm_engine.loading")
    pytest.importorskip("vllm")
    model = families.model(kind, **SIZES, **OWN[kind])
    engine = loading.load_engine(str(save_model(model, tmp_path)), VLLMEngineConfig(kind="vllm", slots=4), version=0)
    try:
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(3, 40, length).tolist()) for length in (5, 19, 30)]
        requests = [Request(RolloutKey(0, 0, at), prompt, 20, Sampling(), seed=at) for at, prompt in enumerate(prompts)]
        for version in range(2):
            ended = finished(engine, requests)
            for request in requests:
                completion = ended[request.key]
                plain = families.plain_logprobs(model, list(request.prompt_ids), completion.token_ids.tolist()).detach()
                np.testing.assert_allclose(completion.logprobs, plain.numpy(), rtol=0, atol=TOLERANCE)
            with torch.no_grad():
                for weights in model.parameters():
                    weights.mul_(1.05)
            engine.load_weights(version + 1, raw_weights(model))
    finally:
        engine.close()
