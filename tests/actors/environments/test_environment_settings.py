"""What is refused before a run: environments that cannot be loaded, are no generators, or ask for what no row has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from async_rlhf import environment
from async_rlhf.actors.environments import EnvironmentConfig, EnvironmentSpec, load, resolve, settings_of
from async_rlhf.actors.environments import spec_of as target_of
from async_rlhf.buffers.errors import ConfigError, EpisodeError

SOURCE = """
from async_rlhf import Score, environment

@environment(max_turns=4, timeout_s=20, name="sums")
async def calculator(question, answer, level=1):
    text = yield question
    yield Score(1.0)

def everything(**columns): yield columns["prompt"]
def plain(question): return question
async def coroutine(question): return question
async def no_yield(question): return question
class Game:
    def __call__(self, seed):
        text = yield str(seed)
game = Game()
number = 3
"""


def spec_of(folder: Path, name: str, **given: Any) -> EnvironmentSpec:
    return resolve(f"tasks.py:{name}", folder, **given)


def test_a_file_of_the_configuration_names_an_environment_with_its_settings(folder: Path) -> None:
    spec = spec_of(folder, "calculator", settings={"timeout_s": 3.0})
    assert (spec.name, spec.kind, spec.max_turns, spec.timeout_s) == ("sums", "async", 4, 3.0)
    assert spec.usable({"question": "?", "answer": "4", "level": 2, "prompt": "", "seed": 1}) == {
        "question": "?", "answer": "4", "level": 2}  # fmt: skip
    assert settings_of(load(spec)).timeout_s == 20
    assert EnvironmentSpec(**json.loads(json.dumps(asdict(spec)))) == spec  # as it travels


def test_a_function_that_is_given_in_python_is_named_by_its_file(folder: Path) -> None:
    function = load(spec_of(folder, "calculator"))
    target = target_of(function)
    assert target == f"{folder / 'tasks.py'}:calculator" and load(resolve(target, Path("/"))) is function


def test_a_module_that_is_called_as_a_form_is_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "remote.py").write_text("def play(question): yield question")
    spec = resolve("remote:play", folder, {"question": "?"})
    assert spec.required == ("question",) and next(load(spec)()) == "?"


def test_an_environment_may_take_every_column_and_be_an_object(folder: Path) -> None:
    assert spec_of(folder, "everything").usable({"prompt": "", "x": 1}) == {"prompt": "", "x": 1}
    assert (spec_of(folder, "game").kind, spec_of(folder, "game").fields) == ("sync", ("seed",))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("calculator", {}, "asks for 'answer', .*did you mean 'answers'"),
        ("calculator", {"options": {"answer": "4", "levle": 2}}, "no such parameter; did you mean 'level'"),
        ("plain", {}, "has no yield; an environment is a generator: it yields the prompt"),
        ("no_yield", {}, "has no yield"),
        ("Score", {}, "is type, no function"),
        ("number", {}, "is int, no function"),
        ("calculator", {"settings": {"max_turns": 0}}, "max_turns=0.: it must be a whole number of 1 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(folder: Path, name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, name, **given).check({"question", "answers"})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tasks.py:calculater", "no 'calculater' at the top level .*did you mean 'calculator'"),
        ("missing.py:f", "environment file .*missing.py does not exist"),
        ("broken.py:f", "importing environment file .* raised OSError: no licence"),
        ("no_such_package.tasks:f", "there is no module 'no_such_package'"),
        ("calculator", "has no module; name it as"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(folder: Path, target: str, message: str) -> None:
    (folder / "broken.py").write_text("raise OSError('no licence')")
    with pytest.raises(EpisodeError, match=message):
        resolve(target, folder)
    with pytest.raises(ConfigError, match=message):
        EnvironmentConfig(function=target).spec(folder)


def test_settings_of_the_decorator_are_checked_where_they_are_written() -> None:
    with pytest.raises(ConfigError, match=r"@environment\(max_turn=...\): there is no such setting; did you mean 'max_turns'"):
        environment(max_turn=3)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"timeout_s=0\): it must be above 0"):
        environment(timeout_s=0)(lambda: None)


def test_a_text_alone_names_the_function_and_given_settings_override_the_decorator(folder: Path) -> None:
    short = EnvironmentConfig.model_validate("tasks.py:calculator")
    assert short == EnvironmentConfig(function="tasks.py:calculator") and short.given == {}
    spec = EnvironmentConfig(function="tasks.py:calculator", max_turns=9).spec(folder)
    assert (spec.max_turns, spec.timeout_s) == (9, 20)
    games = {"games": "tasks.py:calculator"}
    both = EnvironmentConfig.model_validate({"function": "tasks.py:calculator", "by_source": games})
    assert [EnvironmentConfig().all, list(both.all)] == [{}, ["", "games"]]
    with pytest.raises(ValidationError):
        EnvironmentConfig(workers=0)
    with pytest.raises(ValidationError, match="a source has a name"):
        EnvironmentConfig.model_validate({"by_source": {"": "tasks.py:calculator"}})


def test_the_room_of_environments_imports_no_torch() -> None:
    code = "import sys, async_rlhf.actors.environments.pool; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
