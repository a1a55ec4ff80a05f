"""Turns that go on: what is held of them, for how long, and that it changes nothing but the time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.forward import GraphedForward
from async_rlhf.actors.torch_engine.scheduler import Chunk, Copy, Progress, Restored, Scheduler
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling
from tests.actors.test_torch_engine_invariance import MAX_LENGTH, VOCABULARY, bits, make_model

PROMPT = (3, 1, 4)


def make_request(number: int, *context: int) -> Request:
    return Request(RolloutKey(number, 0, 0), PROMPT, 8, Sampling(), number, context=context, hold=True)


def planned(slots: int, *numbers: int) -> Scheduler:
    """These requests came together, and as many as there are slots run."""
    scheduler = Scheduler(slots)
    scheduler.submit([make_request(number) for number in numbers])
    scheduler.plan(version=0)
    return scheduler


def hold_one(scheduler: Scheduler, row: int, token: int, room: int = 100) -> None:
    """The row ended with one token; its cache are its tokens but this one."""
    scheduler.hold(row, [token], scheduler.request(row).prefix_ids, room)
    scheduler.finish([row])


def groups(scheduler: Scheduler, version: int = 0) -> list[int]:
    return [admission.request.key.group for admission in scheduler.plan(version).admitted]


def test_a_continuation_gets_its_cache_back_and_only_what_is_new_is_computed() -> None:
    scheduler = planned(2, 0)
    hold_one(scheduler, 0, token=7)
    assert scheduler.num_unfinished == 0
    scheduler.submit([make_request(0, 7, 8, 9)])
    plan = scheduler.plan(version=0)
    assert plan.restored == (Restored(0, PROMPT, 3),) and plan.chunks == (Chunk((7, 8), 3, (0,), True),)
    assert plan.admitted[0].last_token == 9


def test_where_room_runs_out_the_oldest_caches_go_and_places_in_line_stay() -> None:
    scheduler = planned(3, 0, 1, 2)
    for row in range(3):
        hold_one(scheduler, row, token=7, room=6)
    scheduler.submit([make_request(9)])
    scheduler.submit([make_request(number, 7, 8) for number in (2, 1, 0)])
    plan = scheduler.plan(version=0)
    assert [admission.request.key.group for admission in plan.admitted] == [0, 1, 2]
    assert [restored.row for restored in plan.restored] == [1, 2]
    assert plan.chunks == (
        Chunk(PROMPT[:2], 0, (0,)),
        Chunk((4, 7), 2, (0,), True),
        Chunk((7,), 3, (1,), True),
        Chunk((7,), 3, (2,), True),
    ), "the prompt as a prompt, the rest as what was sampled"


def test_siblings_whose_caches_are_gone_compute_their_prompt_once() -> None:
    scheduler = planned(2, 0, 1)
    for row in range(2):
        hold_one(scheduler, row, token=7)
    scheduler.release_caches()
    scheduler.submit([make_request(0, 7)])
    scheduler.submit([make_request(1, 7)])
    plan = scheduler.plan(version=1)
    assert plan.restored == () and plan.chunks[0] == Chunk(PROMPT[:2], 0, (0, 1))


def test_a_sibling_of_the_same_weights_copies_its_prompt_from_a_continuation() -> None:
    scheduler = planned(2, 0, 1, 2)
    hold_one(scheduler, 0, token=7)
    scheduler.submit([make_request(0, 7)])
    assert groups(scheduler) == [0]
    scheduler.abort({RolloutKey(1, 0, 0)})
    assert scheduler.plan(version=0).copies == (Copy(source=0, target=1, num_tokens=2),)


def test_while_weights_wait_a_continuation_does_not_stand_in_the_way_of_what_had_begun() -> None:
    scheduler = planned(2, 0, 1)
    hold_one(scheduler, 0, token=7)
    scheduler.suspend([(1, Progress(np.array([7], np.int32), np.zeros(1, np.float32), (Span(0, 1),)))])
    scheduler.submit([make_request(0, 7)])
    assert scheduler.num_begun == 1
    assert [each.request.key.group for each in scheduler.plan(version=0, only_begun=True).admitted] == [1]
    assert groups(scheduler) == [0]


# With a model


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
                    turns[request.key] = following(request, completion), turn + 1
                    engine.submit([turns[request.key][0]])
    engine.abort([RolloutKey(1000 + number, 0, 0) for number in range(100)])
    return [found[key] for key in sorted(found)]


def following(request: Request, completion: Completion) -> Request:
    observation = random.Random(request.seed).choices(range(VOCABULARY), k=request.seed % 40)
    context = (*request.context, *completion.token_ids.tolist(), *observation)
    return replace(request, context=context, seed=request.seed + 100)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("multi-head", torch.bfloat16),
        ("grouped-query", torch.float32),
        ("tiny heads", torch.float32),
        ("many inputs", torch.float32),
    ],
)
def test_turns_have_the_same_bits_held_or_not_in_any_company(shape: str, dtype: torch.dtype) -> None:
    model, draw = make_model(shape, dtype), random.Random(5)
    prompts = [tuple(draw.choices(range(VOCABULARY), k=k)) for k in (1, 17, 50)]
    keys = [RolloutKey(group, 0, member) for group in range(3) for member in range(2)]
    asked = [
        Request(key, prompts[key.group], draw.randint(1, 20), Sampling(top_k=n % 3 * 4), seed=n) for n, key in enumerate(keys)
    ]
    alone = TorchEngine(model, slots=1, max_length=MAX_LENGTH, batch_invariant=True)
    expected = [each for request in asked for each in episodes(alone, [request], draw)]
    for hold, prefill_tokens, max_places in ((True, 2048, None), (True, 13, 600), (False, 13, None)):
        sizes = {"prefill_tokens": prefill_tokens, "max_places": max_places, "max_length": MAX_LENGTH}
        engine = TorchEngine(model, slots=5, batch_invariant=True, **sizes)
        held = [replace(request, hold=hold) for request in asked]
        assert episodes(engine, held, draw, fillers=6) == expected


@pytest.mark.parametrize("is_replayed", [False, True])
def test_an_episode_that_is_held_computes_no_prefix_twice(is_replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where decode passes are recorded: what is put back lies where they read it."""
    chunks: list[Chunk] = []
    model = make_model("grouped-query", torch.float32)
    recorder = (lambda run: (run(), run)[1]) if is_replayed else None
    engine = TorchEngine(model, slots=2, max_length=MAX_LENGTH, recorder=recorder)
    assert isinstance(engine._forward, GraphedForward) == is_replayed
    forward = type(engine._forward).__call__
    monkeypatch.setattr(
        type(engine._forward), "__call__", lambda self, new, *others: (chunks.extend(new), forward(self, new, *others))[1]
    )
    prompt = tuple(range(3, 103))
    request = Request(RolloutKey(0, 0, 0), prompt, 12, Sampling(), 9, hold=True)
    held = episodes(engine, [request], random.Random(0))
    assert [(chunk.start, len(chunk.ids)) for chunk in chunks] == [(0, 99), (111, 9), (132, 29)]
    again = episodes(engine, [replace(request, hold=False)], random.Random(0))
    assert [tokens for tokens, *_ in held] == [tokens for tokens, *_ in again]
