"""What a reward is: how it is asked, how its answer is read, and the built-in ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import reasoning_gym as gym

from async_rlhf.actors.rewards import Answer, Signature, reward
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.actors.rewards.builtins.mathematics import math_verify
from async_rlhf.actors.rewards.builtins.text import exact, length, overlong, regex
from async_rlhf.buffers.failures import raised

COMPLETION = {
    "completion": "4",
    "prompt": "2 + 2",
    "completion_ids": [4, 0],
    "prompt_ids": [2, 1, 2],
    "finish_reason": "stop",
    "answer": "4",
    "level": 3,
}


def ask(function: Callable[..., Any], **changes: Any) -> Answer:
    signature = Signature.of(function)
    result = function(**signature.arguments([{**COMPLETION, **changes}], {}))
    (answer,) = signature.read(asyncio.run(result) if signature.is_async else result, 1)
    return answer


# Asking and reading.


def test_arguments_arrive_by_name_and_only_those_asked_for() -> None:
    def takes_some(answer: str, completion_ids: list[int], level: int = 0) -> float:
        return level if answer == "4" and completion_ids == [4, 0] else -1

    assert ask(takes_some) == Answer(3.0)
    assert Signature.of(takes_some).fields == ("answer", "completion_ids", "level")


def test_open_keywords_get_every_field_and_column_and_a_coroutine_of_a_plain_function_is_a_failure() -> None:
    def takes_all(**everything: Any) -> int:
        return int(everything == COMPLETION)

    async def inner() -> float:
        return 1.0

    assert ask(takes_all) == Answer(1.0) and Signature.of(takes_all).fields is None
    assert "async def" in str(ask(lambda completion: inner()).failure)


def test_trl_functions_may_be_async_say_not_applicable_and_default_what_only_trl_has() -> None:
    async def trl(completions: list[str], log_metric: Any = None, trainer_state: Any = None) -> list[float | None]:
        assert log_metric is None and trainer_state is None
        return [None]

    assert ask(trl) == Answer(None)
    assert Signature.of(trl).fields == ("completion", "log_metric", "trainer_state", "prompt", "completion_messages")


def test_a_column_of_the_data_takes_no_completions_place() -> None:
    def trl(completions: list[str], answer: list[str]) -> list[float]:
        return [float(completions == [COMPLETION["completion"]] and answer == [COMPLETION["answer"]])]

    @reward(scope="group")
    def group(completions: list[str], finish_reasons: list[str]) -> list[float]:
        return trl(completions, [COMPLETION["answer"]])

    assert ask(trl, completions=["gold"], prompts="p") == Answer(1.0) == ask(group, completions=["gold"], finish_reasons="f")


def test_a_failure_names_its_exception_is_short_and_carries_the_traceback() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error, start in [(ValueError("no\n" * 10**7), "ValueError: no"), (Unprintable(), "Unprintable: ")]:
        try:
            raise error
        except (ValueError, Unprintable) as caught:
            failure = raised(caught)
        assert failure.reason.startswith(start) and len(failure.reason) <= 500
        assert "test_rewards.py" in failure.traceback and len(failure.traceback) <= 20_000


# Built-ins.


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [("4", " 4\n", "44"), (4, "4", "4.0"), (0.5, "0.5", ".5"), (4.0, "4.0", "4"), (True, "true", "True")],
)
def test_exact_compares_text_but_for_white_space_and_numbers_as_json_writes_them(answer: Any, right: str, wrong: str) -> None:
    assert (exact(right, answer), exact(wrong, answer)) == (1.0, 0.0)


@pytest.mark.parametrize("answer", [None, ["4"], {"value": 4}])
def test_exact_compares_nothing_else(answer: Any) -> None:
    with pytest.raises(TypeError, match="text, a number, true or false can be compared"):
        exact("4", answer)


@pytest.mark.parametrize("task", ["spell_backward", "chain_sum", "countdown"])
def test_reasoning_gym_scores_with_the_tasks_own_rule(task: str) -> None:
    data = gym.create_dataset(task, size=3, seed=7)
    for entry in data:
        for given in (entry["answer"] or "", "nonsense"):
            assert reasoning_gym(given, entry) == data.score_answer(given, entry)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("The answer is \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("so it is 1,000", "1000", 1.0),
        ("$\\sqrt{2}$", "\\sqrt{2}", 1.0),
        ("3", "$4$", 0.0),
        ("so \\boxed{1042}", "1000 + 42 = <<1000+42=1042>>1042\n#### 1,042", 1.0),
        ("so \\boxed{1000}", "1000 + 42 = <<1000+42=1042>>1042\n#### 1,042", 0.0),
        ("no idea", "4", 0.0),
        ("$1/2$", 0.5, 1.0),
    ],
)
def test_math_verify_compares_mathematics_not_text(completion: str, answer: Any, score: float) -> None:
    assert math_verify(completion, answer) == score


def test_math_verify_refuses_an_answer_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="column 'answer' holds no mathematical expression"):
        math_verify("4", "")
    with pytest.raises(TypeError, match="answer is None; text or a number"):
        math_verify("4", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("completion", "pattern", "whole", "score"),
    [
        ("<answer>4</answer>", "<answer>.*</answer>", True, 1.0),
        ("so <answer>4\n</answer>", "<answer>.*</answer>", False, 1.0),
        ("so <answer>4</answer>", "<answer>.*</answer>", True, 0.0),
        ("4", "5", False, 0.0),
    ],
)
def test_regex_asks_for_a_shape(completion: str, pattern: str, whole: bool, score: float) -> None:
    assert regex(completion, pattern, whole) == score


def test_length_is_best_at_its_target() -> None:
    assert [length([0] * n, target=10, tolerance=5).value for n in (0, 5, 8, 10, 12, 15, 99)] == [0, 0, 0.6, 1, 0.6, 0, 0]


def test_the_soft_over_long_penalty_is_dapos() -> None:
    # DAPO equation 13 with L_max = 20 and L_cache = 4.
    assert [overlong([0] * n, max_length=20, buffer=4) for n in (1, 16, 17, 18, 20, 30)] == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize("call", [lambda: overlong([1], 4, 5), lambda: length([1], 4, 0)])
def test_lengths_that_cannot_be_meant_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="is needed"):
        call()
