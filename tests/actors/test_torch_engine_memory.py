"""Where memory is counted: rows wait, are sent back and computed again, and nothing of what they sampled is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import find_max_places, load_engine
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.sampling import Sampling
from tests.actors.torch_models import finished, own_model


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return own_model(request.param, 0)


def make_requests(count: int) -> list[Request]:
    """In groups of four with prompts of 20 tokens; completions of 10 to 80."""
    lengths = np.random.default_rng(0).integers(10, 81, count).tolist()
    prompts = [tuple(np.random.default_rng(n // 4).integers(3, 64, 20).tolist()) for n in range(count)]
    return [Request(RolloutKey(n // 4, 0, n % 4), prompts[n], lengths[n], Sampling(), n) for n in range(count)]


def num_places(engine: TorchEngine) -> int:
    """Tokens for which there is memory in the layer that has most."""
    return max((len(keys) * keys.shape[2] for keys in engine._cache.keys), default=0)


def test_with_little_memory_the_same_is_sampled_and_the_memory_stays_within_its_bound(model: PreTrainedModel) -> None:
    requests = make_requests(16)
    plenty = finished(TorchEngine(model, slots=16, max_length=256), requests)
    engine = TorchEngine(model, slots=16, max_length=256, max_places=400, prefill_tokens=16)
    done: dict[RolloutKey, Completion] = {}
    engine.submit(requests)
    while engine.num_unfinished:
        done.update({completion.key: completion for completion in engine.step()})
        assert num_places(engine) <= 400
    assert engine.num_suspended > 0, "nobody was ever sent back"
    for request in requests:
        assert done[request.key].token_ids.tolist() == plenty[request.key].token_ids.tolist()
        np.testing.assert_allclose(done[request.key].logprobs, plenty[request.key].logprobs, atol=1e-4)
        assert done[request.key].spans == plenty[request.key].spans, "one version, one span, however often it was sent back"


def test_the_earliest_is_never_sent_back_so_there_is_always_progress(model: PreTrainedModel) -> None:
    requests = make_requests(8)
    engine = TorchEngine(model, slots=8, max_length=256, max_places=112)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    assert longest > 112 / 2, "only one of them fits at its full length"
    engine.submit(requests)
    ended = [completion.key for _ in range(sum(r.max_new_tokens for r in requests) + 8) for completion in engine.step()]
    assert sorted(ended) == sorted(request.key for request in requests)


def test_a_sequence_that_can_never_fit_is_refused(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=8, max_places=64)
    with pytest.raises(EngineError, match=r"room for 20 prompt \+ 60 new tokens, engine.kv_bytes has less"):
        engine.submit([Request(RolloutKey(0, 0, 0), (1,) * 20, 60, Sampling(), 0)])


def test_aborting_counts_also_the_tokens_of_those_sent_back(model: PreTrainedModel) -> None:
    requests = [replace(request, max_new_tokens=40) for request in make_requests(8)]
    engine = TorchEngine(model, slots=8, max_length=256, max_places=300)
    engine.submit(requests)
    sampled = 0
    while not engine.num_suspended:
        assert engine.step() == []
        sampled += engine._scheduler.num_rows
    assert engine._scheduler.num_rows < 8
    assert engine.abort([request.key for request in requests]) == sampled
    assert engine.num_unfinished == 0


def test_bytes_are_counted_as_the_model_stores_them(model: PreTrainedModel) -> None:
    heads = 2 if model.config.model_type == "llama" else 4
    a_token = 2 * 4 * heads * 8 * 4  # keys and values, layers, heads, width, bytes of a float32
    assert find_max_places(model, 10 * a_token + 3) == 10
    with pytest.raises(ConfigError, match=f"engine.kv_bytes = 5 holds no token: keys and values of one take {a_token} bytes"):
        find_max_places(model, 5)


def test_the_configuration_bounds_the_memory(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), EngineConfig(slots=16, kv_bytes=200_000, prefill_tokens=64))
    finished(engine, make_requests(12))
    held = sum(part.numel() * part.element_size() for part in (*engine._cache.keys, *engine._cache.values))
    assert 0 < held <= 200_000


def test_a_counted_cache_gives_up_columns_for_rows_and_keeps_what_it_holds() -> None:
    cache = RowCache(slots=8, max_places=128)
    cache.reserve(60, 2)
    cache.begin_tokens(torch.tensor([3, 3]), 60)
    keys, _ = cache.write_tokens(0, torch.ones(2, 1, 4), torch.ones(2, 1, 4))
    assert keys.shape == (2, 1, 60, 4) and cache.keys[0].shape == (2, 1, 64, 4)
    cache.begin_tokens(torch.tensor([4, 4, 4, 4]), 20)
    keys, _ = cache.write_tokens(0, torch.full((4, 1, 4), 2.0), torch.ones(4, 1, 4))
    assert cache.keys[0].shape == (4, 1, 32, 4)
    assert keys[:, 0, 3, 0].tolist() == [1, 1, 0, 0] and keys[:, 0, 4, 0].tolist() == [2, 2, 2, 2]
    assert cache.fits(8, 16) and cache.fits(2, 64) and not cache.fits(8, 17) and not cache.fits(3, 60)
