"""Whatever a reward returns or raises is a score, not applicable, or a failure with a reason: from the call to the record."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from async_rlhf.actors.rewards import Answer, TransientError, resolve, reward
from async_rlhf.actors.rewards.settings import TRANSIENT
from async_rlhf.actors.scoring.reward_worker import Answers, RewardCall, ready, run_call
from async_rlhf.actors.workers import messages
from async_rlhf.buffers.errors import RecordError
from async_rlhf.buffers.failures import raised
from async_rlhf.buffers.score import MAX_SCORE, Score

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([10**400, -(10**400), 10**19, 1e308, 1e18, True]),
    st.floats(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats().map(np.array),
    st.floats().map(lambda number: np.array([number])),
    st.sampled_from([np.array("text"), np.datetime64("2020-01-01"), np.longdouble("1e4000"), np.ones(2), np.array(None)]),
)
PLAIN = st.one_of(st.none(), NUMBERS, TEXTS, st.binary(max_size=20), st.builds(object))
NESTED = st.recursive(
    PLAIN,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.tuples(below),
        st.dictionaries(st.one_of(TEXTS, st.integers(), st.none()), below, max_size=3),
    ),
    max_leaves=6,
)


def scored(value: float | None, metrics: dict[Any, Any], failure: str | None) -> Score:
    """A score whose contents were changed after they had been checked."""
    score = Score(1.0)
    object.__setattr__(score, "value", None if failure is not None else value)
    object.__setattr__(score, "failure", failure)
    object.__setattr__(score, "metrics", metrics)
    return score


SCORES = st.builds(
    scored, NESTED, st.one_of(NESTED, st.dictionaries(NESTED.filter(lambda key: hashable(key)), NESTED)), st.none() | TEXTS
)


def hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def echo(completion: Any) -> Any:
    if isinstance(completion, BaseException):
        raise completion
    return completion


def echo_list(completions: list[Any]) -> Any:
    return echo(completions[0])


@reward(scope="group")
def echo_group(completions: list[Any]) -> Any:
    return echo(completions[0])


TARGETS = [f"{__name__}:{name}" for name in ("echo", "echo_list", "echo_group")]
READY = {spec.name: ready(spec, None) for spec in resolve(TARGETS, Path("/"))}


def ask(name: str, value: Any, count: int = 1) -> Answers:
    return run_call(READY[name], RewardCall(name, tuple({"completion": value, "prompt": ""} for _ in range(count)), 1.0))


def check(answer: Answer) -> None:
    """It reaches the actor from a worker, from a scorer and from a reward server, and is a score there."""
    score = pickle.loads(pickle.dumps(answer)).score()
    assert score.value is None or (type(score.value) is float and abs(score.value) <= MAX_SCORE)
    assert score.failure is None or 0 < len(score.failure) <= 500
    response = messages.Stepped(id=0, turn=0, answers=[messages.to_fields(answer)])
    for codec in (messages.STAGES, messages.SERVED):
        received = codec.unpack(codec.pack(response))
        assert isinstance(received, messages.Stepped)
        assert [each.score() for each in messages.to_answers(received.answers)] == [score]


@given(st.one_of(NESTED, SCORES))
def test_whatever_one_call_returns_is_a_score_or_a_failure(value: Any) -> None:
    (answer,) = ask("echo", value)
    check(answer)
    if type(value) in (int, float) and abs(value) <= MAX_SCORE:
        assert answer.value == value
    elif value is not None and not isinstance(value, Score | bool | Fraction | np.generic | np.ndarray):
        assert answer.failure is not None


@given(st.one_of(st.lists(NESTED | SCORES, min_size=2, max_size=2), NESTED), st.sampled_from(["echo_list", "echo_group"]))
def test_whatever_a_list_holds_each_member_has_a_score_or_a_failure(value: Any, name: str) -> None:
    answers = ask(name, value, count=2)
    assert len(answers) == 2
    for answer in answers:
        check(answer)


@pytest.mark.parametrize(
    "wrong", [10**400, -(10**5000), 2**63, math.nan, "text", np.longdouble("1e4000"), 1e308, Decimal(1), object()], ids=type
)
def test_what_is_wrong_with_one_member_is_none_of_the_others(wrong: Any) -> None:
    first, second = ask("echo_group", [wrong, 2.0], count=2)
    assert first.failure is not None and second.value == 2.0
    if not isinstance(wrong, str | Decimal) and type(wrong) is not object:
        assert "a score must be finite and within +-1e+18" in first.failure.reason


@pytest.mark.parametrize(
    "wrong", ["text", [1.0], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), 1j, np.complex64(1), torch.tensor(1j)], ids=type
)
def test_a_score_or_metric_that_is_no_number_is_refused_with_what_was_given(wrong: Any) -> None:
    with pytest.raises(RecordError, match=r"a score must be finite and within .* got "):
        Score(wrong)
    with pytest.raises(RecordError, match=r"metric 'size' of a score must be finite, within .* got "):
        Score(1.0, metrics={"size": wrong})


@pytest.mark.parametrize(
    "kind", [np.float32, np.int64, np.bool_, np.array, torch.tensor, torch.nn.Parameter, lambda n: np.array([n])]
)
def test_numbers_of_numpy_and_torch_are_scores_one_by_one_and_in_lists(kind: Any) -> None:
    one = kind(torch.tensor(1.0)) if kind is torch.nn.Parameter else kind(1.0)
    assert ask("echo", one)[0].value == 1.0 == ask("echo", torch.ones(1, 1))[0].value
    for several in ([one, one], (one, one), np.ones((2, 1)), torch.ones(2, 1), torch.ones(2, dtype=torch.bfloat16)):
        assert [answer.value for answer in ask("echo_list", several, count=2)] == [1.0, 1.0]
    for other in (np.ones(2), "1.0", [1.0], {"score": 1}):
        assert ask("echo", other)[0].score().failure.startswith(f"returned {type(other).__name__} ")


@given(TEXTS, st.sampled_from([ValueError, KeyError, SystemExit, KeyboardInterrupt, GeneratorExit, RecursionError]))
@example("half \ud800", ValueError)
def test_whatever_a_reward_raises_is_a_failure(text: str, kind: type[BaseException]) -> None:
    (answer,) = ask("echo", kind(text))
    check(answer)
    assert answer.failure is not None and answer.failure.reason.startswith(kind.__name__)


@given(st.one_of(NESTED, st.just(math.inf)))
def test_no_error_makes_its_score_be_waited_for_without_an_end(after_s: Any) -> None:
    error = TransientError("busy", after_s=after_s)
    try:
        raise error
    except TransientError as caught:
        pause_s = raised(caught, TRANSIENT).retry_after_s
    assert pause_s is not None and 0 <= pause_s <= 600
