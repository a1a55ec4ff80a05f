"""Rows of several turns, each continuing the one before: the whole row's tokens are one prefix, held or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Engine, OnUpdate, Request, RolloutKey
from async_rlhf.buffers.sampling import Sampling
from tests.actors.conformance.conftest import Subject
from tests.actors.torch_models import finished
from tests.actors.vllm_model import END, expected_logprobs, make_model

FIRST, SECOND = make_model(0), make_model(1)
MODELS = (FIRST, SECOND)
PROMPT = tuple(range(10, 30))
# Of different lengths; after the second turn there is none.
OBSERVATIONS = (tuple(range(40, 47)), (), (31, 32))
TURNS = 3
Turn = tuple[Request, Completion]


def first_turns(count: int, hold: bool = True, num_new: int = 12, **asked: Any) -> list[Request]:
    """Groups of two siblings."""
    named = {name: asked.pop(name) for name in asked.keys() & Sampling.model_fields.keys()}
    sampling = Sampling(**named)
    return [
        Request(RolloutKey(n // 2, 0, n % 2), (*PROMPT, 5 + n // 2), num_new, sampling, seed=n, hold=hold, **asked)
        for n in range(count)
    ]


def continued(request: Request, completion: Completion, turn: int) -> Request:
    """What the environment makes of a turn: the next one, behind an observation."""
    context = (*request.context, *completion.token_ids.tolist(), *OBSERVATIONS[turn % len(OBSERVATIONS)])
    return replace(request, context=context, seed=1000 * (turn + 1) + request.seed)


def episodes(engine: Engine, asked: list[Request], between: Callable[[int], None] = lambda turn: None) -> Iterator[Turn]:
    """All turns of all rows; `between` is called before each turn but the first."""
    for turn in range(TURNS):
        if turn:
            between(turn)
        engine.submit(asked)
        assert engine.num_unfinished == len(asked), "held rows do not count"
        done = finished(engine)
        ended = [(request, done[request.key]) for request in asked]
        yield from ended
        asked = [continued(request, completion, turn) for request, completion in ended]
    engine.abort([request.key for request in asked])


def assert_plain(subject: Subject, model: PreTrainedModel, request: Request, completion: Completion) -> None:
    np.testing.assert_allclose(
        completion.logprobs, expected_logprobs(model, request, completion.token_ids), atol=subject.tolerance
    )


def assert_fresh(subject: Subject, request: Request, completion: Completion) -> None:
    """What is said to be of one version over its whole prefix is what this version's plain pass says."""
    last = completion.spans[-1]
    if last.cache_version is None:
        expected = expected_logprobs(MODELS[last.version], request, completion.token_ids)[-last.num_tokens :]
        np.testing.assert_allclose(completion.logprobs[-last.num_tokens :], expected, atol=subject.tolerance)


def test_every_turn_has_the_logprobs_of_one_plain_pass_over_its_whole_row(subject: Subject) -> None:
    engine = subject.start("keep")
    turns = [*episodes(engine, first_turns(4)), *episodes(engine, first_turns(2, hold=False, temperature=0.0))]
    for request, completion in turns:
        assert_plain(subject, FIRST, request, completion)
        assert [(span.version, span.cache_version) for span in completion.spans] == [(0, None)]
        assert sum(span.num_tokens for span in completion.spans) == len(completion.token_ids) <= 12
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
    assert sum(len(request.context) > 30 for request, _ in turns) >= 4, "rows were too short to mean anything"


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"top_k": 5}], ids=str)
def test_a_held_row_goes_on_as_one_that_was_not_held(exact_subject: Subject, asked: dict[str, Any]) -> None:
    engine = exact_subject.start("keep")
    held, again = (list(episodes(engine, first_turns(3, hold=hold, **asked))) for hold in (True, False))
    for (request, one), (_, other) in zip(held, again, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=exact_subject.tolerance)
        if "top_k" in asked:
            assert one.sampling_mask is not None and one.sampling_mask.sizes.tolist() == [5] * len(one.token_ids)
        if "temperature" in asked:
            with torch.no_grad():
                logits = FIRST(input_ids=torch.tensor([request.prefix_ids])).logits[0, -1]
            assert one.token_ids[0] == logits.argmax()


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_weights_that_change_between_turns_are_in_the_spans(subject: Subject, mode: OnUpdate) -> None:
    engine = subject.start(mode)
    # Forward, and back again: an actor returns to older weights when the learner does.
    update = {1: (1, SECOND), 2: (0, FIRST)}
    turns = list(
        episodes(engine, first_turns(4), lambda turn: engine.load_weights(update[turn][0], subject.weights(update[turn][1])))
    )
    assert engine.version == 0
    for index, (request, completion) in enumerate(turns):
        assert {span.version for span in completion.spans} == {(0, 1, 0)[index // 4]}
        if subject.name == "torch" and mode == "keep":
            assert [span.cache_version for span in completion.spans] == [(None, 0, None)[index // 4]]
        if mode != "keep":
            assert [span.cache_version for span in completion.spans] == [None]
        assert_fresh(subject, request, completion)


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_weights_that_change_within_a_turn_let_held_rows_go_on(subject: Subject, mode: OnUpdate) -> None:
    engine = subject.start(mode)
    held, running = first_turns(4), first_turns(subject.many(8, 84), num_new=60)[4:]
    done = finished(engine, held)
    asked = [continued(request, done[request.key], 0) for request in held]
    engine.submit(running)
    before = subject.begin(engine)
    engine.load_weights(1, subject.weights(SECOND))
    assert engine.version == (0 if mode == "finish" else 1), "it waits for running turns"
    done = finished(engine, asked, before)
    assert engine.version == 1
    for request in asked:
        completion = done[request.key]
        assert {span.version for span in completion.spans} == {1}, "a continuation begins with the newest weights"
        assert mode == "keep" or completion.spans[0].cache_version is None
        assert_fresh(subject, request, completion)
    engine.abort([request.key for request in asked])


def test_what_does_not_continue_the_held_row_or_one_that_was_aborted_is_computed_whole(subject: Subject) -> None:
    engine = subject.start("keep")
    asked = first_turns(6)
    done_before = finished(engine, asked)
    tokens = {request.key: done_before[request.key].token_ids.tolist() for request in asked}
    other = [
        replace(asked[0], context=(50, *tokens[asked[0].key][1:], 60)),  # another first token
        replace(asked[1], context=tuple(tokens[asked[1].key][:-1])),  # less than what is held
        replace(asked[2], prompt_ids=(9, *asked[2].prompt_ids[1:]), context=tuple(tokens[asked[2].key])),
        replace(asked[3], prompt_ids=asked[3].prompt_ids[:-1], context=(asked[3].prompt_ids[-1], *tokens[asked[3].key])),
        replace(asked[4], context=()),
    ]
    done = finished(engine, other)
    assert engine.abort([request.key for request in asked]) == 0 and engine.num_unfinished == 0
    again = [continued(asked[5], done_before[asked[5].key], 0), replace(asked[1], prompt_ids=(7, 8, 9), hold=False)]
    done |= finished(engine, again)  # of one that was held and aborted, continued all the same
    for request in [other[0], *other[2:], *again]:
        assert_plain(subject, FIRST, request, done[request.key])


@pytest.mark.parametrize("mode", ["keep", "interrupt"])
def test_a_row_that_begins_anew_reads_its_new_prompt_alone_and_goes_on_from_there(subject: Subject, mode: OnUpdate) -> None:
    engine = subject.start(mode)
    asked = first_turns(4)
    done = finished(engine, asked)
    # Siblings begin anew with what each of them wrote, shorter or longer than what is held.
    anew = [
        replace(
            each, prompt_ids=(*PROMPT[: 3 + 9 * each.key.group], *done[each.key].token_ids.tolist(), 33), seed=70 + each.seed
        )
        for each in asked
    ]
    engine.load_weights(1, subject.weights(SECOND))
    ended = finished(engine, anew)
    on = [continued(each, ended[each.key], 0) for each in anew]
    after = finished(engine, on)
    for request, completion in [*((each, ended[each.key]) for each in anew), *((each, after[each.key]) for each in on)]:
        assert [(span.version, span.cache_version) for span in completion.spans] == [(1, None)]
        assert_plain(subject, SECOND, request, completion)
    engine.abort([request.key for request in on])
