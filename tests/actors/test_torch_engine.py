"""What is particular to the built-in engine behind the seam; what every engine must do is in `conformance`."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Request, RolloutKey, check_room
from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import find_max_places, load_engine
from async_rlhf.actors.torch_engine.reserved import Reserved, ReservedCache
from async_rlhf.actors.torch_engine.scheduler import Size
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.torch_models import finished, own_model
from tests.actors.vllm_model import raw_weights

MAX_LENGTH = 160


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Served by the pass written for it, and by its own code."""
    return own_model(request.param, 0)


def make_request(number: int, num_prompt: int = 5, num_new: int = 10) -> Request:
    prompt = np.random.default_rng(number).integers(3, 64, num_prompt)
    return Request(RolloutKey(number, 0, 0), tuple(prompt.tolist()), num_new, Sampling(), number)


def mixed_requests(count: int) -> list[Request]:
    """Prompts of 1 to 9 tokens, completions of 1 to 30."""
    lengths = np.random.default_rng(99).integers((1, 1), (10, 31), (count, 2))
    return [make_request(n, int(p), int(t)) for n, (p, t) in enumerate(lengths)]


def assert_plain(model: PreTrainedModel, requests: list[Request], done: dict[RolloutKey, Completion]) -> None:
    for request in requests:
        completion = done[request.key]
        plain = families.plain_logprobs(model, list(request.prompt_ids), completion.token_ids.tolist()).detach()
        np.testing.assert_allclose(completion.logprobs, plain.numpy(), rtol=0, atol=1e-4)


def test_passes_that_are_recorded_and_replayed_give_what_passes_computed_anew_give(model: PreTrainedModel) -> None:
    recorded: list[torch.Size] = []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        recorded.append(run().shape)
        return run

    engine, requests = TorchEngine(model, slots=6, max_length=MAX_LENGTH, recorder=record), mixed_requests(14)
    assert_plain(model, requests, finished(engine, requests))
    assert 0 < len(recorded) <= 2 * len({1, 2, 4, 6}), "once per shape, and once more where buffers were replaced"


def test_two_runs_with_the_same_submissions_are_equal_to_the_last_bit(model: PreTrainedModel) -> None:
    one, other = (finished(TorchEngine(model, slots=4), mixed_requests(10)) for _ in range(2))
    assert list(one) == list(other)
    for key, completion in one.items():
        assert completion.token_ids.tobytes() == other[key].token_ids.tobytes()
        assert completion.logprobs.tobytes() == other[key].logprobs.tobytes()


def test_new_weights_are_adopted_between_two_tokens_and_stamp_what_they_sample(model: PreTrainedModel) -> None:
    assert TorchEngine(model, slots=4).version == -1
    engine, request = TorchEngine(model, slots=4, version=3), make_request(1, num_new=9)
    engine.submit([request])
    for _ in range(4):
        assert engine.step() == []
    engine.load_weights(7, raw_weights(own_model(model.config.model_type, 1)))
    assert finished(engine)[request.key].spans == (Span(3, 4), Span(7, 5, cache_version=3))


def test_the_longest_sequence_that_fits_is_served(model: PreTrainedModel) -> None:
    engine = TorchEngine(model, slots=4, max_length=MAX_LENGTH)
    requests = [make_request(n, num_prompt=p, num_new=MAX_LENGTH - p) for n, p in enumerate((1, 100, MAX_LENGTH - 1))]
    assert_plain(model, requests, finished(engine, requests))


# From a directory


@pytest.fixture
def saved(tmp_path: Path) -> str:
    families.model("llama", vocab_size=16, max_position_embeddings=32).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_saved_model_is_served_with_its_version_its_limit_and_all_its_end_tokens(saved: str) -> None:
    requests = [Request(RolloutKey(0, 0, number), (1, 5), 30, Sampling(), number) for number in range(32)]
    engine = load_engine(saved, TorchEngineConfig(slots=8), version=4)
    assert engine.version == 4
    done = finished(engine, requests).values()
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert all((c.token_ids[-1] == 2) == (c.finish_reason == "stop") for c in done)
    with pytest.raises(EngineError, match="the model holds 32"):
        engine.submit([replace(requests[0], max_new_tokens=31)])
    settings = Path(saved) / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(range(1, 16))}))
    done = finished(load_engine(saved, TorchEngineConfig(slots=4)), requests[:4]).values()
    assert all(set(c.token_ids[:-1].tolist()) <= {0} and c.token_ids[-1] != 0 for c in done)


@pytest.mark.parametrize(
    ("settings", "described", "message"),
    [
        ({}, "", r"no config\.json"),
        ({}, '{"model_type": "no-such-architecture"}', "no causal language model"),
        ({"device": "warp:9"}, "{}", r"engine\.device = 'warp:9' is no torch device"),
        ({"device": "cuda:99"}, "{}", r"engine\.device = 'cuda:99'"),
        ({"cuda_graphs": True}, "{}", r"engine\.cuda_graphs = true with engine\.device = 'cpu'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(settings: dict[str, Any], described: str, message: str, tmp_path: Path) -> None:
    if described:
        (tmp_path / "config.json").write_text(described)
    with pytest.raises(ConfigError, match=message):
        load_engine(str(tmp_path), TorchEngineConfig(**settings))


# Where memory is counted


def long_requests(count: int) -> list[Request]:
    """In groups of four with prompts of 20 tokens; completions of 10 to 80."""
    lengths = np.random.default_rng(0).integers(10, 81, count).tolist()
    return [replace(make_request(n // 4, 20, lengths[n]), key=RolloutKey(n // 4, 0, n % 4), seed=n) for n in range(count)]


def bytes_of_a_token(model: PreTrainedModel) -> int:
    """Keys and values, layers, heads, width, bytes of a float32."""
    return 2 * 4 * (2 if model.config.model_type == "llama" else 4) * 8 * 4


def test_with_little_memory_the_same_is_sampled_within_its_bound_and_the_earliest_is_never_sent_back(
    model: PreTrainedModel,
) -> None:
    requests = long_requests(16)
    assert 20 + max(request.max_new_tokens for request in requests) > 180 / 2, "only one of them fits at its full length"
    plenty = finished(TorchEngine(model, slots=16, max_length=256), requests)
    for max_places in (250, 180):
        engine = TorchEngine(model, slots=16, max_length=256, max_places=max_places, prefill_tokens=16)
        done: dict[RolloutKey, Completion] = {}
        engine.submit(requests)
        for _ in range(sum(request.max_new_tokens + 2 for request in requests)):
            done.update({completion.key: completion for completion in engine.step()})
            assert engine.cache_bytes <= max_places * bytes_of_a_token(model)
        assert engine.num_suspended > 0 and len(done) == len(requests), "there is always progress"
        for request in requests:
            assert done[request.key].token_ids.tolist() == plenty[request.key].token_ids.tolist()
            np.testing.assert_allclose(done[request.key].logprobs, plenty[request.key].logprobs, atol=1e-4)
            assert done[request.key].spans == plenty[request.key].spans, "one version, one span, however often sent back"


def test_aborting_counts_also_the_tokens_of_those_sent_back_and_what_can_never_fit_is_refused(model: PreTrainedModel) -> None:
    requests = [replace(request, max_new_tokens=40) for request in long_requests(8)]
    engine = TorchEngine(model, slots=8, max_length=256, max_places=300)
    engine.submit(requests)
    sampled = 0
    while not engine.num_suspended:
        assert engine.step() == []
        sampled += engine._scheduler.num_rows
    assert engine._scheduler.num_rows < 8
    assert engine.abort([request.key for request in requests]) == sampled
    assert engine.num_unfinished == 0
    with pytest.raises(EngineError, match=r"room for 20 prompt \+ 290 new tokens, engine.kv_bytes has less"):
        TorchEngine(model, slots=8, max_places=64).submit([replace(requests[0], max_new_tokens=290)])


def test_room_for_the_longest_completion_is_looked_for_before_there_is_one(model: PreTrainedModel, tmp_path: Path) -> None:
    engine = TorchEngine(model, slots=8, max_places=64)
    check_room(engine, 20, 44)
    assert engine.num_unfinished == 0
    with pytest.raises(ConfigError, match=r"needs room for 20 prompt \+ 45 new tokens, engine.kv_bytes has less"):
        check_room(engine, 20, 45)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^a completion needs room for .*, engine.kv_bytes has less"):
        load_engine(str(tmp_path), TorchEngineConfig(kv_bytes=9 * bytes_of_a_token(model)))


def test_bytes_are_counted_as_the_model_stores_them_and_bound_the_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    a_token = bytes_of_a_token(model)
    assert find_max_places(model, 10 * a_token + 3) == 10
    with pytest.raises(ConfigError, match=f"engine.kv_bytes = 5 holds no token: keys and values of one take {a_token} bytes"):
        find_max_places(model, 5)
    model.save_pretrained(tmp_path)
    engine = load_engine(str(tmp_path), TorchEngineConfig(slots=16, kv_bytes=200_000, prefill_tokens=64))
    finished(engine, long_requests(8))
    assert 0 < engine.cache_bytes <= 200_000


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
    assert [cache.fits(Size(*each)) for each in ((8, 16), (2, 64), (8, 17), (3, 60))] == [True, True, False, False]


def test_rows_take_memory_for_what_they_hold_and_grow_where_they_are(model: PreTrainedModel) -> None:
    engine, a_token, addresses = TorchEngine(model, slots=16, max_length=256), bytes_of_a_token(model), set()
    engine.submit([replace(make_request(99, 20, 230)), *(make_request(n, 20, 40) for n in range(31))])
    while engine.num_unfinished:
        engine.step()
        held = int(engine._rows.positions[: engine._scheduler.num_rows].sum())
        assert engine.cache_bytes <= (held + 16 * 128) * a_token, "and the first columns of rows that have ended"
        addresses.add(engine._cache.addresses())
    engine.step()
    assert len(addresses) == 1 and engine.cache_bytes <= (15 * 60 + 128) * a_token


ROWS = st.integers(0, 3)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), ROWS, st.integers(1, 300)),
            st.tuples(st.just("copy"), ROWS, ROWS),
            st.tuples(st.just("clear"), ROWS, st.none()),
            st.tuples(st.just("release"), ROWS, st.none()),
            st.tuples(st.just("expect"), st.integers(1, 900), st.none()),
            st.tuples(st.just("keep"), ROWS, ROWS),
        ),
        max_size=30,
    ),
    st.sampled_from([None, 4000]),
)
def test_a_reserved_cache_holds_what_a_growing_one_holds(history: list[tuple[str, int, Any]], max_places: int | None) -> None:
    """Two layers; a column is a 64th of a page."""
    caches, lengths = (RowCache(4), ReservedCache(4, max_places=max_places)), [0] * 4
    for number, (what, first, second) in enumerate(history):
        for cache in caches:
            if what == "write":
                at = torch.arange(lengths[first], lengths[first] + second)
                cache.begin_tokens(at, lengths[first] + second, torch.full_like(at, first))
                for layer in range(2):
                    new = (at + 1000 * number + layer / 2)[:, None, None].expand(-1, 2, 16).float()
                    cache.write_tokens(layer, new, -new)
            elif what == "copy" and first != second:
                cache.copy_rows([first], [second], lengths[first])
            elif what == "keep" and cache.keys:
                cache.put_row(second, cache.keep_row(first, lengths[first]))
            elif what in ("clear", "release", "expect"):
                getattr(cache, {"clear": "clear_rows"}.get(what, what))([first] if what == "clear" else first)
        if what == "write":
            lengths[first] += second
        elif what in ("copy", "keep"):
            lengths[second] = lengths[first]
        elif what == "clear":
            lengths[first] = 0
        elif what == "release":
            lengths[first:] = [0] * (4 - first)
        for ours, plain in zip((*caches[1].keys, *caches[1].values), (*caches[0].keys, *caches[0].values), strict=True):
            assert all(torch.equal(ours[row, :, :length], plain[row, :, :length]) for row, length in enumerate(lengths))
            assert ours.isfinite().all()
        assert sum(lengths) * 2 * 2 * 2 * 16 * 4 <= caches[1].num_bytes or not caches[1].keys


def test_addresses_take_no_memory_and_what_is_given_back_is_taken_from_it() -> None:
    before, of_this = psutil.Process().memory_info().rss, Reserved((64, 1 << 20, 16), torch.float32)
    of_this.tensor[7] = 1.0
    assert 60 << 20 < psutil.Process().memory_info().rss - before < 90 << 20 < of_this.tensor.nbytes
    of_this.give_back((7 << 24) + 5, (8 << 24) - 5)
    assert psutil.Process().memory_info().rss - before < 30 << 20
    assert of_this.tensor[7].count_nonzero() == 2 * (mmap.PAGESIZE // 4), "the pages at both ends hold more"
    with pytest.raises(EngineError, match=r"no addresses for 67108864\.0 GiB of keys or values"):
        Reserved((1 << 54,), torch.float32)
