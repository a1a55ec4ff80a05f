"""An environment that only the calling process has is played there, by the run's own machinery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf import Feedback, Score, environment
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.rewards.loading import attribute
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.episodes import EpisodeTrial, configuration, play
from async_rlhf.run.caller import served, target_of
from async_rlhf.run.config import Config

ROWS = [Row("2 * 4 =", {"answer": "8"})]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 * 4 =", "answer": "8"}\n{"prompt": "1 + 1 =", "answer": "2"}\n')

    def made(function: Any, **settings: Any) -> Config:
        target, _ = target_of(function)
        return configuration(target, str(tmp_path / "data.jsonl"), None, settings)

    return made


def trials(function: Any, config: Config, *turns: str) -> list[EpisodeTrial]:
    written = iter(turns)
    with served({}, function, config, ROWS) as (resolved, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return list(play(resolved, 2, lambda _: next(written, None)))


def test_its_steps_run_in_this_process_and_its_settings_hold_in_the_run(config: Callable[..., Config]) -> None:
    seen = []

    @environment(max_turns=2, name="own")
    def closure(prompt: str, answer: str, bonus: float = 0.0) -> Iterator[Any]:
        try:
            text = yield [{"role": "user", "content": prompt}]
            while text != answer:
                seen.append(text)
                text = yield Feedback("No.", score=0.25)
            yield Score(1.0 + bonus, metrics={"length": len(text)})
        finally:
            seen.append("closed")

    found = trials(closure, config(closure, **{"environment.options": {"bonus": 0.5}}), "8", "no", "neither")
    assert [part.content for part in found[1].parts] == [[{"role": "user", "content": "1 + 1 ="}], "no", "No.", "neither"]
    assert found[1].parts[2].score == 0.25 and found[1].end == "max_turns"
    assert found[0].end == "scored" and found[0].score == Score(1.5, metrics={"length": 1.0})
    assert seen == ["closed", "no", "neither", "closed"]


class Account:
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Account, r"Account is a class.*'trl:my_environment.py:Account'.*%%writefile my_environment.py"),
        ([attribute], r"it is a list.*'trl:my_environment.py:TOOLS'"),
        (lambda prompt: prompt, r"has no yield"),
        (lambda prompt, anser: (yield anser), r"asks for 'anser'.*'answer'"),
        (environment(at_limit=None)(lambda prompt: (yield prompt)), r"at_limit=None.*%%writefile my_environment.py"),
        (environment(tools=[print])(lambda prompt: (yield prompt)), r"tools=.*not be shown.*%%writefile my_environment.py"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_run(config: Callable[..., Config], function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trials(function, config(function))


def test_a_second_run_beside_it_has_its_own(config: Callable[..., Config]) -> None:
    def own(prompt: str, answer: str) -> Iterator[Any]:
        yield prompt
        yield Score(1.0)

    def other(prompt: str, answer: str) -> Iterator[Any]:
        yield prompt
        yield Score(2.0)

    with served({}, own, config(own), ROWS) as (_, variables):
        assert [trial.score for trial in trials(other, config(other), "8", "2")] == [Score(2.0), Score(2.0)]
        with served({}, other, config(other), ROWS) as (_, others):
            assert variables.keys() == others.keys() and variables != others


def test_columns_are_asked_of_the_rows_alone_that_are_judged_or_played(small: Any) -> None:
    def own(prompt: str, answer: str) -> Iterator[Any]:
        yield Score(1.0)

    of_words = {"rewards.by_source": {"words": []}, "environment.by_source.words": "words.py:words"}
    words, others = Row("a", {"source": "words"}), Row("b", {"source": "numbers", "answer": "8"})
    for rewards, function in (({"judge": lambda completion, answer: 1.0}, None), ({}, own)):
        with served(rewards, function, small(**of_words), [words, others]):
            pass
        with pytest.raises(ConfigError, match="'answer'"), served(rewards, function, small(), [words, others]):
            pass


def test_without_the_process_that_has_it_every_episode_says_so(config: Callable[..., Config]) -> None:
    found = list(play(config(lambda prompt: (yield prompt)), 1, lambda _: None))
    assert [
        trial.score is not None and "is in the process that started this run" in str(trial.score.failure) for trial in found
    ] == [True]
