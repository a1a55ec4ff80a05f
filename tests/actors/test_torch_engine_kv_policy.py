"""A cache that keeps a part of a row: what is sampled is what one masked pass over the row says, and memory has a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, OnUpdate, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.kv_policy import KeptPositions, KVPolicy
from async_rlhf.actors.torch_engine.llama import LlamaForward
from async_rlhf.buffers.sampling import Sampling
from tests.actors.torch_models import finished, own_model
from tests.actors.vllm_model import raw_weights

VOCABULARY, MAX_LENGTH = 64, 320
# Of full attention, where nothing is evicted.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": MAX_LENGTH},
    "qwen3": {"max_position_embeddings": MAX_LENGTH, "use_sliding_window": False},
    "gpt2": {"n_positions": MAX_LENGTH},
}
Done = dict[RolloutKey, Completion]
ENDS = np.isin(np.arange(VOCABULARY), range(3, VOCABULARY, 6))


def policy(sinks: int = 2, window: int = 5, representatives: int = 3, chunk: int = 6) -> KVPolicy:
    return KVPolicy(sinks, window, representatives, chunk, ENDS)


POLICIES = {
    "first": policy(),
    "window": policy(representatives=0),
    "no sinks": policy(sinks=0, window=1, representatives=4),
}


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    return own_model(kind, seed, **MODELS[kind])


def make_requests(count: int = 6, group: int = 2) -> list[Request]:
    """In groups of equal prompts of 1 to 40 tokens; completions of 20 to 60."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, VOCABULARY, size).tolist()) for size in (1, 40, 23)]
    lengths = rng.integers(20, 61, count).tolist()
    return [Request(RolloutKey(n // group, 0, n % group), prompts[n // group], lengths[n], Sampling(), n) for n in range(count)]


def representatives_of(ids: Sequence[int], each: KVPolicy) -> list[int]:
    """The positions that stand for a chunk, the sinks left out."""
    chunks: list[list[int]] = [[]]
    for position, token in enumerate(ids):
        chunks[-1].append(position)
        if ENDS[token] or len(chunks[-1]) == each.chunk:
            chunks.append([])
    return [chunk[0] for chunk in chunks if chunk and chunk[0] >= each.sinks]


def kept_at(t: int, ids: Sequence[int], each: KVPolicy) -> set[int]:
    """Twin of `KVPolicy.visible`: the positions that the token at t attends to."""
    sinks = set(range(min(each.sinks, t + 1)))
    window = set(range(max(0, t - each.window + 1), t + 1))
    evicted = [position for position in representatives_of(ids[: t + 1], each) if position <= t - each.window]
    return sinks | window | set(evicted[len(evicted) - min(len(evicted), each.representatives) :])


def masked_logprobs(model: PreTrainedModel, each: KVPolicy, row: Sequence[int]) -> np.ndarray:
    """The oracle: one plain pass over the whole row, every query with the positions it keeps. [T - 1]"""
    mask = torch.full((len(row), len(row)), torch.finfo(torch.float32).min)
    for t in range(len(row)):
        mask[t, sorted(kept_at(t, row, each))] = 0.0
    ids = torch.tensor([row])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits[0, :-1]
    found: np.ndarray = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found


def expected_logprobs(model: PreTrainedModel, each: KVPolicy, request: Request, completion: Completion) -> np.ndarray:
    return masked_logprobs(model, each, [*request.prefix_ids, *completion.token_ids.tolist()])[len(request.prefix_ids) - 1 :]


def assert_masked(model: PreTrainedModel, each: KVPolicy, asked: Sequence[Request], done: Done) -> None:
    for request in asked:
        expected = expected_logprobs(model, each, request, done[request.key])
        np.testing.assert_allclose(done[request.key].logprobs, expected, atol=1e-4)


@given(
    each=st.builds(
        policy,
        sinks=st.integers(0, 4),
        window=st.integers(1, 8),
        representatives=st.integers(0, 5),
        chunk=st.integers(2, 9),
    ),
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_rows_keep_what_the_definition_says_however_the_tokens_come(each: KVPolicy, ids: list[int], cuts: list[int]) -> None:
    wanted = [kept_at(t, ids, each) for t in range(len(ids))]
    assert [set(np.flatnonzero(seen)) for seen in each.mask(np.array(ids))] == wanted
    assert max(map(len, wanted)) <= each.budget

    rows, held = KeptPositions(each, 1), np.full(each.budget + 1, -1)  # held: what a cache that is written as told would hold
    start = 0
    for cut in cuts:
        part = np.array(ids[start : start + cut])
        if len(part):
            written = rows.take_chunk([0], part, start)
            columns = np.append(held, np.arange(start, start + len(part)))
            for t, seen in enumerate(written.mask, start):
                assert set(columns[seen]) == wanted[t]
            held[written.columns] = start + written.tokens
        start += len(part)
    for t in range(start, len(ids)):
        column, seen = rows.take_tokens(np.array(ids[t : t + 1]), np.array([t]))
        held[column[0]] = t
        assert set(held[seen[0]]) == wanted[t] and not seen[0, -1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", POLICIES)
def test_what_is_sampled_is_what_a_masked_pass_over_the_row_says(name: str, kind: str) -> None:
    model, each, requests = make_model(name), POLICIES[kind], make_requests()
    engine = TorchEngine(model, slots=3, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
    assert isinstance(engine._forward, LlamaForward) == (name == "llama"), "both ways of computing are tried"
    assert_masked(model, each, requests, finished(engine, requests))


CROSSED = {"keep": ((0, None), (1, 0)), "interrupt": ((0, None), (1, None)), "finish": ((0, None),)}


@pytest.mark.parametrize(
    ("name", "on_update"), [("llama", "keep"), ("llama", "finish"), ("llama", "interrupt"), ("gpt2", "interrupt")]
)
def test_new_weights_begin_with_what_the_policy_keeps_of_a_prefix(name: str, on_update: OnUpdate) -> None:
    models, requests = [make_model(name), make_model(name, seed=1)], make_requests()
    sizes = {"slots": 3, "max_length": MAX_LENGTH, "prefill_tokens": 16}
    engine = TorchEngine(make_model(name), version=0, on_update=on_update, kv_policy=POLICIES["first"], **sizes)
    engine.submit(requests[: len(requests) // 2])
    before = [completion for _ in range(25) for completion in engine.step()]
    engine.load_weights(1, raw_weights(models[1]))
    done = finished(engine, requests[len(requests) // 2 :], before)
    seen = Counter[tuple[tuple[int | None, int | None], ...]]()
    for request in requests:
        completion, begin = done[request.key], 0
        seen[tuple((span.version, span.cache_version) for span in completion.spans)] += 1
        for span in completion.spans:
            part = slice(begin, begin := begin + span.num_tokens)
            if span.cache_version is None:
                expected = expected_logprobs(models[span.version or 0], POLICIES["first"], request, completion)
                np.testing.assert_allclose(completion.logprobs[part], expected[part], atol=1e-4)
    assert seen.keys() - {((0, None),)} == {CROSSED[on_update], ((1, None),)} - {((0, None),)}, seen


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_a_turn_goes_on_from_what_was_kept_of_the_one_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, each = make_model(name), POLICIES["first"]
    engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
    first, other = replace(make_requests()[2], hold=True), make_requests()[4]
    turn = finished(engine, [first, other])[first.key]
    second = replace(first, context=(*turn.token_ids.tolist(), *range(20)), max_new_tokens=30, hold=False)
    computed: list[int] = []
    forward = type(engine._forward).__call__
    monkeypatch.setattr(
        type(engine._forward),
        "__call__",
        lambda self, new, *more: (computed.extend(c.start for c in new if c.sampled), forward(self, new, *more))[1],
    )
    done = finished(engine, [replace(other, seed=77), second])
    assert min(computed) == len(first.prompt_ids) + len(turn.token_ids) - 1, "nothing before is computed again"
    assert_masked(model, each, [second], done)


def test_a_row_takes_its_budget_however_long_it_is_and_where_memory_is_counted() -> None:
    model, each, requests = make_model("llama"), POLICIES["first"], make_requests()
    a_row = 2 * 4 * 2 * (each.budget + 1) * 8 * 4  # keys and values, layers, heads, tokens, width, bytes of a float32
    for length in (24, 300):
        engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
        finished(engine, [Request(RolloutKey(0, 0, 0), tuple(range(10)), length - 10, Sampling(), 0)])
        assert engine.cache_bytes == 2 * a_row
    engine = TorchEngine(model, slots=6, max_length=MAX_LENGTH, max_places=2 * (each.budget + 1), kv_policy=each)
    engine.submit(requests)
    done: Done = {}
    while engine.num_unfinished:
        done.update({completion.key: completion for completion in engine.step()})
        assert engine._scheduler.num_rows <= 2
    assert_masked(model, each, requests, done)


def test_the_probe_attends_to_everything() -> None:
    model = make_model("llama")
    kept = TorchEngine(model, slots=1, max_length=MAX_LENGTH, kv_policy=POLICIES["window"])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    everything = replace(POLICIES["window"], window=60)
    np.testing.assert_allclose(kept.probe(ids), masked_logprobs(model, everything, ids), atol=1e-4)
    assert np.abs(kept.probe(ids) - masked_logprobs(model, POLICIES["window"], ids)).max() > 0.1
