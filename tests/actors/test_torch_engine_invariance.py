"""A completion has the same bits whatever else the engine does, where `batch_invariant` is promised.

Each shape of model stands for another way in which products could come to differ: heads of 32 are whole vectors, heads of
20 are not, heads of 4 make products so small that torch has a way of its own for them, shared key heads make others
again. Float32 with many inputs has another product for a single row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from async_rlhf.actors.engine import Bits, Completion, Engine, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.forward import GraphedForward
from async_rlhf.actors.torch_engine.llama import LlamaForward
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.sampling import Sampling
from tests.actors.strange_products import strange_products
from tests.actors.torch_models import finished

VOCABULARY, MAX_LENGTH = 300, 900
SHAPES = {
    "multi-head": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
    "grouped-query": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "one key head": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
    "odd heads": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3},
    "tiny heads": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "many inputs": {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 2048},
}
PROMPTS = (1, 2, 15, 16, 17, 40, 64, 65, 130)
SAMPLINGS = ({}, {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05})


@cache
def make_model(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 90, "num_hidden_layers": 2, **SHAPES[shape]}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**sizes, **ids, max_position_embeddings=MAX_LENGTH, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@cache
def make_requests(count: int = 16) -> tuple[Request, ...]:
    """In pairs, most of which share their prompt; lengths and ways of sampling are mixed."""
    draw = random.Random(1)
    requests: list[Request] = []
    for index in range(count):
        prompt = tuple(draw.choices(range(VOCABULARY), k=draw.choice(PROMPTS)))
        if index % 2 and draw.random() < 0.7:
            prompt = requests[-1].prompt_ids
        key = RolloutKey(index // 2, 0, index % 2)
        sampling = Sampling(**draw.choice(SAMPLINGS))
        requests.append(Request(key, prompt, draw.randint(1, 60), sampling, seed=index))
    return tuple(requests)


def bits(completion: Completion) -> tuple[object, ...]:
    sampling_mask = completion.sampling_mask
    return (
        completion.token_ids.tolist(),
        completion.logprobs.tobytes(),
        None if sampling_mask is None else (sampling_mask.sizes.tolist(), sampling_mask.ids.tolist()),
    )


@cache
def alone(shape: str, dtype: torch.dtype) -> dict[RolloutKey, tuple[object, ...]]:
    """Every request by itself, its prompt computed at once."""
    engine = TorchEngine(make_model(shape, dtype), slots=1, max_length=MAX_LENGTH, batch_invariant=True)
    done = [finished(engine, [request])[request.key] for request in make_requests()]
    return {completion.key: bits(completion) for completion in done}


def in_company(engine: TorchEngine, draw: random.Random, interrupts: bool) -> dict[RolloutKey, tuple[object, ...]]:
    """All requests in a drawn order, submitted a few at a time while others run; some are aborted."""
    waiting, done = list(make_requests()), {}
    draw.shuffle(waiting)
    while waiting or engine.num_unfinished:
        if waiting and draw.random() < 0.3:
            count = draw.randint(1, 8)
            engine.submit(waiting[:count])
            del waiting[:count]
        if interrupts and engine.version < 4 and draw.random() < 0.1:
            engine.load_weights(engine.version + 1, {})
        if draw.random() < 0.003 and engine.num_unfinished:
            engine.abort([draw.choice(sorted(engine._scheduler.unfinished_keys()))])
        done.update({completion.key: bits(completion) for completion in engine.step()})
    return done


def differing(
    shape: str, dtype: torch.dtype, seed: int, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Completions that differ from the same request alone, in a drawn engine and company; and how often one was sent back."""
    monkeypatch.setattr("async_rlhf.actors.torch_engine.engine.check_weights", lambda *_: None)
    monkeypatch.setattr("async_rlhf.actors.torch_engine.engine.adopt_weights", lambda *_: None)  # the same weights again
    draw = random.Random(seed)
    interrupts = seed % 2 == 1
    engine = TorchEngine(
        make_model(shape, dtype),
        slots=draw.choice([4, 16, 64]),
        max_length=MAX_LENGTH,
        on_update="interrupt" if interrupts else "keep",
        prefill_tokens=draw.choice([13, 50, 2048]),
        max_places=None if interrupts else draw.choice([300, 500]),
        batch_invariant=batch_invariant,
    )
    found = in_company(engine, draw, interrupts)
    expected = alone(shape, dtype)
    assert len(found) > len(expected) // 2, "most were aborted"
    return sum(found[key] != expected[key] for key in found), engine.num_suspended


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """What was computed alone is computed again: products are others."""
    alone.cache_clear()
    yield
    alone.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.rest)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_completion_has_the_same_bits_in_any_company(shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [differing(shape, dtype, seed, True, monkeypatch) for seed in range(3)]
    assert [count for count, _ in found] == [0, 0, 0]
    assert sum(num_suspended for _, num_suspended in found) > 0, "nobody was ever sent back"


def test_a_completion_of_several_blocks_of_columns_has_the_same_bits_in_any_company(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rlhf.actors.torch_engine.llama_invariant.MOST_COLUMNS", 64)
    assert differing("grouped-query", torch.float32, 1, True, monkeypatch)[0] == 0


@pytest.mark.parametrize("shape", ["multi-head", "one key head"])
def test_a_long_completion_has_the_same_bits_in_any_company(shape: str) -> None:
    """As long as products are that libraries cut into parts."""
    draw = random.Random(2)
    sizes = ((500, 60), (390, 120), (300, 90))
    requests = [
        Request(RolloutKey(index, 0, 0), tuple(draw.choices(range(VOCABULARY), k=prompt)), new, Sampling(), index)
        for index, (prompt, new) in enumerate(sizes)
    ]
    found = []
    for slots, prefill_tokens in ((1, 2048), (3, 37)):
        model = make_model(shape, torch.float32)
        sizes_of = {"slots": slots, "max_length": MAX_LENGTH, "prefill_tokens": prefill_tokens}
        engine = TorchEngine(model, **sizes_of, batch_invariant=True)
        found.append({key: bits(completion) for key, completion in finished(engine, requests).items()})
    assert found[0] == found[1]


def test_where_weights_cannot_be_packed_bits_do_not_depend_on_company_either(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differing("multi-head", torch.float32, 0, False, monkeypatch)[0] > 0, "else no test here could fail"
    monkeypatch.setattr("async_rlhf.actors.torch_engine.llama.can_pack", lambda dtype: False)
    alone.cache_clear()
    assert differing("many inputs", torch.float32, 0, True, monkeypatch)[0] == 0


# Turns that go on


def episodes(engine: Engine, asked: list[Request], draw: random.Random, fillers: int = 0) -> list[tuple[object, ...]]:
    """Three turns of each request behind observations that depend on its key; bits of all turns, by key and turn.

    fillers: other requests that come and go beside them.
    """
    found: dict[tuple[RolloutKey, int], tuple[object, ...]] = {}
    turns = {request.key: (request, 0) for request in asked}
    engine.submit(asked)
    while turns:
        if fillers and draw.random() < 0.2:
            fillers -= 1
            prompt = tuple(draw.choices(range(VOCABULARY), k=30))
            engine.submit([Request(RolloutKey(1000 + fillers, 0, 0), prompt, draw.randint(1, 30), Sampling(), fillers)])
        for completion in engine.step():
            if completion.key in turns:
                request, turn = turns.pop(completion.key)
                found[completion.key, turn] = bits(completion)
                if turn < 2:
                    observation = random.Random(request.seed).choices(range(VOCABULARY), k=request.seed % 40)
                    context = (*request.context, *completion.token_ids.tolist(), *observation)
                    turns[request.key] = replace(request, context=context, seed=request.seed + 100), turn + 1
                    engine.submit([turns[request.key][0]])
    engine.abort([RolloutKey(1000 + number, 0, 0) for number in range(100)])
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize(("shape", "dtype"), [("multi-head", torch.bfloat16), ("grouped-query", torch.float32)])
def test_turns_have_the_same_bits_held_or_not_in_any_company(shape: str, dtype: torch.dtype) -> None:
    model, draw = make_model(shape, dtype), random.Random(5)
    prompts = [tuple(draw.choices(range(VOCABULARY), k=k)) for k in (1, 17, 50)]
    keys = [RolloutKey(group, 0, member) for group in range(3) for member in range(2)]
    asked = [
        Request(key, prompts[key.group], draw.randint(1, 20), Sampling(top_k=n % 3 * 4), seed=n) for n, key in enumerate(keys)
    ]
    by_itself = TorchEngine(model, slots=1, max_length=MAX_LENGTH, batch_invariant=True)
    expected = [each for request in asked for each in episodes(by_itself, [request], draw)]
    for hold, prefill_tokens, max_places in ((True, 2048, None), (True, 13, 600), (False, 13, None)):
        sizes = {"prefill_tokens": prefill_tokens, "max_places": max_places, "max_length": MAX_LENGTH}
        engine = TorchEngine(model, slots=5, batch_invariant=True, **sizes)
        held = [replace(request, hold=hold) for request in asked]
        assert episodes(engine, held, draw, fillers=6) == expected


@pytest.mark.parametrize("is_replayed", [False, True])
def test_an_episode_that_is_held_computes_no_prefix_twice(is_replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where decode passes are recorded: what is put back lies where they read it."""
    chunks: list[PrefillChunk] = []
    model = make_model("grouped-query", torch.float32)
    recorder = (lambda run: (run(), run)[1]) if is_replayed else None
    engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, recorder=recorder)
    assert isinstance(engine._forward, GraphedForward) == is_replayed
    forward = type(engine._forward).__call__
    monkeypatch.setattr(
        type(engine._forward), "__call__", lambda self, new, *others: (chunks.extend(new), forward(self, new, *others))[1]
    )
    request = Request(RolloutKey(0, 0, 0), tuple(range(3, 103)), 12, Sampling(), 9, hold=True)
    held = episodes(engine, [request], random.Random(0))
    assert [(chunk.start, len(chunk.ids)) for chunk in chunks] == [(0, 99), (111, 9), (132, 29)]
    again = episodes(engine, [replace(request, hold=False)], random.Random(0))
    assert [tokens for tokens, *_ in held] == [tokens for tokens, *_ in again]


# Where it is promised


def test_it_is_on_where_it_is_left_open_and_refused_only_where_it_is_demanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("grouped-query", torch.float32).save_pretrained(tmp_path)
    engines = {asked: load_engine(str(tmp_path), TorchEngineConfig(batch_invariant=asked)) for asked in (None, True, False)}
    assert [engine.is_batch_invariant for engine in engines.values()] == [True, True, False]
    assert engines[None].bits == engines[True].bits == Bits(digest=engines[True].bits.digest)
    assert engines[False].bits == Bits(obstacle="engine.batch_invariant = false")
    with strange_products("borders"):
        elsewhere = load_engine(str(tmp_path), TorchEngineConfig())
    assert elsewhere.is_batch_invariant and elsewhere.bits.digest not in ("", engines[None].bits.digest)

    class Unlike(LlamaForward):
        """Rounds by how many rows there are."""

        def __call__(self, *arguments: Any) -> torch.Tensor:
            logits = super().__call__(*arguments)
            return logits * (1 + 1e-6 * len(logits))

    monkeypatch.setattr("async_rlhf.actors.torch_engine.engine.InvariantLlamaForward", Unlike)
    reason = "on this processor the bits of a completion depend on what is computed beside it"
    engine = load_engine(str(tmp_path), TorchEngineConfig())
    assert engine.bits == Bits(obstacle=reason) and type(engine._forward) is LlamaForward
    with pytest.raises(ConfigError, match=f'true: {reason}. Set engine.batch_invariant = "none"'):
        load_engine(str(tmp_path), TorchEngineConfig(batch_invariant=True))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None),
        # Heads of 6: every other one begins in the middle of a vector.
        LlamaConfig(vocab_size=24, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4),
    ],
)
def test_a_model_that_cannot_be_served_so_is_refused_where_it_is_asked_for(config: PretrainedConfig, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "as it is configured; only plain Llama" in load_engine(str(tmp_path), TorchEngineConfig()).bits.obstacle
    with pytest.raises(ConfigError, match=r"batch_invariant = true with model type '\w+' as it is configured; only plain"):
        load_engine(str(tmp_path), TorchEngineConfig(batch_invariant=True))
