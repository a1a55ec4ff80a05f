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
