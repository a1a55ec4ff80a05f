"""A cache that keeps a part of a row: what is sampled is what one masked pass over the row says, and memory has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from async_rlhf.actors.engine import Completion, OnUpdate, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.kv_policy import KeptRows, KVPolicy, Representative
from async_rlhf.actors.torch_engine.llama import LlamaForward
from async_rlhf.buffers.record import Int32Array, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor

VOCABULARY, MAX_LENGTH = 24, 320
SHARED = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WIDE = SHARED | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}
CONFIGS = {
    "llama": LlamaConfig(**WIDE),
    "qwen3": Qwen3Config(**WIDE, head_dim=16),
    "gpt2": GPT2Config(**SHARED, n_embd=32, n_layer=3, n_head=4, n_positions=MAX_LENGTH),
}
ENDS = np.isin(np.arange(VOCABULARY), (3, 7, 11, 15))


def policy(
    sinks: int = 2, window: int = 5, representatives: int = 3, chunk: int = 6, representative: Representative = "first"
) -> KVPolicy:
    return KVPolicy(sinks, window, representatives, chunk, representative, ENDS)


POLICIES = {
    "first": policy(),
    "last": policy(representative="last"),
    "window": policy(representatives=0),
    "no sinks": policy(sinks=0, window=1, representatives=4),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def make_requests(count: int = 6, group: int = 2) -> list[Request]:
    """In groups of equal prompts of 1 to 40 tokens; completions of 20 to 60."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, VOCABULARY, size).tolist()) for size in (1, 40, 23)]
    lengths = rng.integers(20, 61, count).tolist()
    return [Request(RolloutKey(n // group, 0, n % group), prompts[n // group], lengths[n], Sampling(), n) for n in range(count)]


def run(engine: TorchEngine) -> dict[RolloutKey, Completion]:
    done: dict[RolloutKey, Completion] = {}
    while engine.num_unfinished:
        done.update({completion.key: completion for completion in engine.step()})
    return done


def raw_weights(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor("float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
        for name, parameter in model.named_parameters()
    }


def representatives_of(ids: Sequence[int], each: KVPolicy) -> list[int]:
    """The positions that stand for a chunk, the sinks left out."""
    chunks: list[list[int]] = [[]]
    for position, token in enumerate(ids):
        chunks[-1].append(position)
        if ENDS[token] or len(chunks[-1]) == each.chunk:
            chunks.append([])
    if each.representative == "last":
        found = [chunk[-1] for chunk in chunks if chunk and (ENDS[ids[chunk[-1]]] or len(chunk) == each.chunk)]
    else:
        found = [chunk[0] for chunk in chunks if chunk]
    return [position for position in found if position >= each.sinks]


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


def assert_masked_logprobs(
    model: PreTrainedModel, each: KVPolicy, request: Request, tokens: Int32Array, logprobs: np.ndarray
) -> None:
    expected = masked_logprobs(model, each, [*request.prefix_ids, *tokens.tolist()])
    np.testing.assert_allclose(logprobs, expected[len(request.prefix_ids) - 1 :], atol=1e-4)


@given(
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60),
    sinks=st.integers(0, 4),
    window=st.integers(1, 8),
    representatives=st.integers(0, 5),
    chunk=st.integers(2, 9),
    representative=st.sampled_from(("first", "last")),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_rows_keep_what_the_definition_says_however_the_tokens_come(
    ids: list[int],
    sinks: int,
    window: int,
    representatives: int,
    chunk: int,
    representative: Representative,
    cuts: list[int],
) -> None:
    each = KVPolicy(sinks, window, representatives, chunk, representative, ENDS)
    wanted = [kept_at(t, ids, each) for t in range(len(ids))]
    assert [set(np.flatnonzero(seen)) for seen in each.mask(np.array(ids))] == wanted
    assert max(map(len, wanted)) <= each.budget

    rows, held = KeptRows(each, 1), np.full(each.budget + 1, -1)  # held: what a cache that is written as told would hold
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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", POLICIES)
def test_what_is_sampled_is_what_a_masked_pass_over_the_row_says(name: str, kind: str) -> None:
    model, each = make_model(name), POLICIES[kind]
    engine = TorchEngine(model, slots=3, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
    assert isinstance(engine._forward, LlamaForward) == (name == "llama"), "both ways of computing are tried"
    requests = make_requests()
    engine.submit(requests)
    done = run(engine)
    for request in requests:
        completion = done[request.key]
        assert_masked_logprobs(model, each, request, completion.token_ids, completion.logprobs)


def test_with_room_for_all_tokens_it_is_full_attention() -> None:
    model, requests = make_model("llama"), make_requests()
    engines = [TorchEngine(model, slots=3, max_length=MAX_LENGTH, kv_policy=each) for each in (None, policy(window=MAX_LENGTH))]
    for engine in engines:
        engine.submit(requests)
    full, kept = (run(engine) for engine in engines)
    for key, completion in full.items():
        assert kept[key].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(kept[key].logprobs, completion.logprobs, atol=1e-5)


def with_an_update(engine: TorchEngine, newer: PreTrainedModel, requests: Sequence[Request]) -> dict[RolloutKey, Completion]:
    """Half of the requests, some steps, the rest of them and new weights."""
    engine.submit(requests[: len(requests) // 2])
    done = {completion.key: completion for _ in range(25) for completion in engine.step()}
    engine.load_weights(1, raw_weights(newer))
    engine.submit(requests[len(requests) // 2 :])
    return done | run(engine)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_what_an_update_interrupts_goes_on_from_what_the_policy_keeps_of_its_prefix(name: str) -> None:
    older, newer, each = make_model(name), make_model(name, seed=1), POLICIES["first"]
    engine = TorchEngine(
        make_model(name), slots=3, version=0, max_length=MAX_LENGTH, prefill_tokens=16, on_update="interrupt", kv_policy=each
    )
    requests = make_requests()
    done = with_an_update(engine, newer, requests)
    versions = set()
    for request in requests:
        completion, begin = done[request.key], 0
        for span in completion.spans:
            versions.add((span.version, len(completion.spans)))
            expected = masked_logprobs(
                older if span.version == 0 else newer, each, [*request.prompt_ids, *completion.token_ids.tolist()]
            )[len(request.prompt_ids) - 1 :]
            part = slice(begin, begin := begin + span.num_tokens)
            np.testing.assert_allclose(completion.logprobs[part], expected[part], atol=1e-4)
    assert {(0, 2), (1, 2), (1, 1)} <= versions, "some were interrupted, some began after"


@pytest.mark.parametrize("on_update", ("keep", "finish"))
def test_other_updates_leave_rows_as_they_are(on_update: OnUpdate) -> None:
    model, newer, each = make_model("llama"), make_model("llama", seed=1), POLICIES["first"]
    engine = TorchEngine(make_model("llama"), slots=3, version=0, max_length=MAX_LENGTH, on_update=on_update, kv_policy=each)
    requests = make_requests()
    done = with_an_update(engine, newer, requests)
    mixed = 0
    for request in requests:
        completion = done[request.key]
        weights = {0: model, 1: newer}[completion.spans[0].version]
        first = slice(0, completion.spans[0].num_tokens)
        expected = masked_logprobs(weights, each, [*request.prompt_ids, *completion.token_ids.tolist()])
        np.testing.assert_allclose(completion.logprobs[first], expected[len(request.prompt_ids) - 1 :][first], atol=1e-4)
        mixed += completion.spans[1:] == (Span(1, completion.spans[-1].num_tokens, cache_version=0),)
    assert mixed == (2 if on_update == "keep" else 0)


def test_same_weights_adopted_again_change_nothing() -> None:
    """Under `keep` and `interrupt` alike, although the second computes every prefix again."""
    model, each = make_model("llama"), POLICIES["first"]
    requests = make_requests()
    for on_update in ("keep", "interrupt"):
        engine = TorchEngine(
            make_model("llama"), slots=3, version=0, max_length=MAX_LENGTH, prefill_tokens=16, on_update=on_update,
            kv_policy=each,
        )  # fmt: skip
        for request, completion in zip(
            requests, map(with_an_update(engine, model, requests).get, (r.key for r in requests)), strict=True
        ):
            assert completion is not None
            assert_masked_logprobs(model, each, request, completion.token_ids, completion.logprobs)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_a_turn_goes_on_from_what_was_kept_of_the_one_before(name: str) -> None:
    model, each = make_model(name), POLICIES["last"]
    engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
    first = replace(make_requests()[2], hold=True)
    other = make_requests()[4]
    engine.submit([first, other])
    turn = run(engine)[first.key]
    context = (*turn.token_ids.tolist(), *range(20))
    second = replace(first, context=context, max_new_tokens=30, hold=False)
    engine.submit([replace(other, seed=77), second])
    computed: list[int] = []
    plan = engine._scheduler.plan

    def watched(*args: object, **kwargs: object) -> object:
        found = plan(*args, **kwargs)  # type: ignore[arg-type]
        computed.extend(chunk.start for chunk in found.chunks if chunk.sampled)
        return found

    engine._scheduler.plan = watched  # type: ignore[assignment]
    completion = run(engine)[second.key]
    assert min(computed) == len(first.prompt_ids) + len(turn.token_ids) - 1, "nothing before is computed again"
    assert_masked_logprobs(model, each, second, completion.token_ids, completion.logprobs)


def test_memory_does_not_grow_with_length() -> None:
    model, each = make_model("llama"), policy(sinks=2, window=16, representatives=6)
    sizes = {}
    for length in (24, 10 * each.window, 300):
        engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, prefill_tokens=16, kv_policy=each)
        engine.submit([Request(RolloutKey(0, 0, 0), tuple(range(10)), length - 10, Sampling(), 0)])
        run(engine)
        sizes[length] = engine.cache_bytes
    layers, heads, width, tokens = 3, 2, 8, each.budget + 1
    assert set(sizes.values()) == {2 * layers * 2 * heads * tokens * width * 4}, "keys and values of two rows, float32"


def test_where_memory_is_counted_a_row_takes_its_budget() -> None:
    model, each, requests = make_model("llama"), POLICIES["first"], make_requests()
    engine = TorchEngine(model, slots=6, max_length=MAX_LENGTH, max_places=2 * (each.budget + 1), kv_policy=each)
    engine.submit(requests)
    done: dict[RolloutKey, Completion] = {}
    while engine.num_unfinished:
        done.update({completion.key: completion for completion in engine.step()})
        assert engine._scheduler.num_rows <= 2
    for request in requests:
        assert_masked_logprobs(model, each, request, done[request.key].token_ids, done[request.key].logprobs)


def test_the_probe_attends_to_everything() -> None:
    model = make_model("llama")
    kept = TorchEngine(model, slots=1, max_length=MAX_LENGTH, kv_policy=POLICIES["window"])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    everything = replace(POLICIES["window"], window=60)
    np.testing.assert_allclose(kept.probe(ids), masked_logprobs(model, everything, ids), atol=1e-4)
    assert np.abs(kept.probe(ids) - masked_logprobs(model, POLICIES["window"], ids)).max() > 0.1
