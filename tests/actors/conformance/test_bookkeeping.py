"""What every engine must do that has nothing to do with a model: the scripted one of the simulation must do it too.

Else the simulation would prove something about actors whose engines behave as none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.sampling import Sampling
from tests.actors.torch_models import finished
from tests.actors.vllm_model import make_model, raw_weights

WEIGHTS = raw_weights(make_model(1))


def asked(count: int, first: int = 0) -> list[Request]:
    return [Request(RolloutKey(n, 0, 0), (10, 11, 12), 8 + n, Sampling(), seed=n) for n in range(first, first + count)]


def run(engine: Engine, asked: Sequence[Request] = (), before: Sequence[Completion] = ()) -> list[Completion]:
    return list(finished(engine, asked, before).values())


def test_every_request_comes_back_once_within_its_length(any_engine: Engine) -> None:
    requests = asked(12)
    any_engine.submit(requests)
    assert any_engine.num_unfinished == 12
    done = {completion.key: completion for completion in run(any_engine)}
    assert done.keys() == {request.key for request in requests}
    for request in requests:
        completion = done[request.key]
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= request.max_new_tokens
        assert sum(span.num_tokens for span in completion.spans) == len(completion.token_ids)
        assert completion.finish_reason in ("stop", "length")
    assert any_engine.step() == [], "and not again"


def test_versions_only_rise_along_a_completion_and_the_last_is_the_newest(any_engine: Engine) -> None:
    any_engine.submit(asked(12))
    before = any_engine.step()
    any_engine.load_weights(1, WEIGHTS)
    assert any_engine.version == 1
    for completion in run(any_engine, before=before):
        versions = [span.version for span in completion.spans]
        assert versions == sorted(set(versions)) and set(versions) <= {0, 1}
    assert {span.version for completion in run(any_engine, asked(3, first=20)) for span in completion.spans} == {1}


def test_what_is_aborted_is_forgotten_and_what_is_unknown_ignored(any_engine: Engine) -> None:
    requests = asked(6)
    any_engine.submit(requests)
    any_engine.abort([RolloutKey(99, 0, 0), *(request.key for request in requests[:4])])
    assert any_engine.num_unfinished == 2
    assert {completion.key for completion in run(any_engine)} == {request.key for request in requests[4:]}
    assert any_engine.abort([request.key for request in requests]) == 0
    assert len(run(any_engine, requests[:1])) == 1, "an aborted key may come again"


def test_a_turn_that_ended_is_not_unfinished_and_its_key_goes_on(any_engine: Engine) -> None:
    (request,) = asked(1)
    (first,) = run(any_engine, [replace(request, hold=True)])
    assert any_engine.num_unfinished == 0
    any_engine.submit([replace(request, context=(*first.token_ids.tolist(), 13), seed=1)])
    assert any_engine.num_unfinished == 1
    (second,) = run(any_engine)
    assert 1 <= len(second.token_ids) <= request.max_new_tokens, "its own turn alone"
    run(any_engine, [replace(request, hold=True)])
    assert any_engine.abort([request.key]) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Request(RolloutKey(1, 0, 0), (), 5, Sampling(), 0), "empty prompt"),
        (Request(RolloutKey(1, 0, 0), (5,), 0, Sampling(), 0), "max_new_tokens = 0"),
        (Request(RolloutKey(0, 0, 0), (5,), 1, Sampling(), 0), "already submitted"),
    ],
)
def test_one_bad_request_refuses_all_submitted_with_it(any_engine: Engine, wrong: Request, said: str) -> None:
    any_engine.submit(asked(1))
    with pytest.raises(EngineError, match=said):
        any_engine.submit([*asked(1, first=2), wrong])
    assert any_engine.num_unfinished == 1
    assert len(run(any_engine)) == 1


# What is told of a completion before it ends, for incremental scoring

EVERY = 5


def long(count: int) -> list[Request]:
    """So long that an engine in other processes still writes when this one comes back from being kept from the processor."""
    return [
        Request(RolloutKey(n, 0, 0), (10, 11, 12), 110 + n, Sampling(), 31 * n + 20, partial_every=EVERY) for n in range(count)
    ]


def test_what_is_told_is_how_the_completion_begins_and_comes_in_steps(any_engine: Engine) -> None:
    quiet = replace(long(1)[0], key=RolloutKey(99, 0, 0), partial_every=0)
    any_engine.submit([*long(5), replace(long(6)[5], context=(20, 21)), quiet])  # of a continuation its own turn
    known: dict[RolloutKey, int] = {}
    told: dict[RolloutKey, list[list[int]]] = {}
    done: dict[RolloutKey, Completion] = {}
    while any_engine.num_unfinished:
        done |= {completion.key: completion for completion in any_engine.step()}
        for partial in any_engine.partials(known):
            assert partial.key not in done and len(partial.token_ids) >= known.get(partial.key, 0) + EVERY
            known[partial.key] = len(partial.token_ids)
            told.setdefault(partial.key, []).append(partial.token_ids.tolist())
    assert any(len(done[key].token_ids) > 2 * EVERY for key in done) and told and quiet.key not in told
    for key, beginnings in told.items():
        whole = done[key].token_ids.tolist()
        assert all(whole[: len(each)] == each for each in beginnings)


def test_nothing_is_told_of_who_was_aborted(any_engine: Engine) -> None:
    any_engine.submit(long(4))
    seen: set[RolloutKey] = set()
    while not seen and any_engine.num_unfinished:
        any_engine.step()
        seen = {partial.key for partial in any_engine.partials({})}
    any_engine.abort(seen)
    assert seen and not seen.intersection(partial.key for partial in any_engine.partials({}))
    any_engine.abort([request.key for request in long(4)])
