"""How a reward is found by name and named by its function, and what is refused before any process starts."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.rewards import RewardSpec, check_columns, load, resolve, reward, spec_in_process, spec_of
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.actors.rewards.builtins.text import exact
from async_rlhf.buffers.errors import ConfigError, RewardError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "judge.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# Names to functions.


def test_built_ins_modules_and_files_resolve_and_load(
    file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file("async def judge(completion, answer): return 1.0")
    target = "async_rlhf.actors.rewards.builtins.gym:reasoning_gym"
    specs = resolve(["exact", target, "~/judge.py:judge"], tmp_path / "elsewhere")
    assert specs == (
        RewardSpec("exact", "exact", "sync", ("completion", "answer")),
        RewardSpec("reasoning_gym", target, "sync", ("completion", "entry")),
        RewardSpec("judge", f"{tmp_path / 'judge.py'}:judge", "async", ("completion", "answer")),
    )
    assert tuple(RewardSpec(**json.loads(json.dumps(asdict(spec)))) for spec in specs) == specs
    assert load(specs[0]) is exact and load(specs[1]) is reasoning_gym


def test_the_decorator_names_a_reward_and_leaves_it_callable(file: Callable[[str], Path], tmp_path: Path) -> None:
    @reward(name="twice")
    def double(completion: str) -> float:
        return 2 * float(completion)

    assert double("2") == 4.0
    file("from async_rlhf.actors.rewards import reward\n@reward(name='strict')\ndef f(completion): return 1.0\n")
    assert [spec.name for spec in resolve(["judge.py:f"], tmp_path)] == ["strict"]


def test_a_setting_that_the_decorator_does_not_have_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"@reward\(weigth=...\): there is no such setting; did you mean 'weight'\?"):
        reward(weigth=0.5)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "setting",
    [{"weight": "x"}, {"retries": None}, {"batch_size": 2.5}, {"timeout_s": "5"}, {"batch_wait_s": -1}, {"stop_when": 5}],
    ids=str,
)
def test_a_setting_that_the_decorator_cannot_take_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"@reward\({next(iter(setting))}=.*\): it must be "):
        reward(**setting)(lambda completion: 1.0)


@pytest.mark.parametrize("given", [5, "judge", print])
def test_the_decorator_is_for_functions_of_ones_own(given: Any) -> None:
    with pytest.raises(ConfigError, match="@reward: a function of your own was expected, got "):
        reward(given)


def test_a_file_is_loaded_once_not_as_main_and_may_import_its_neighbours(file: Callable[..., Path], tmp_path: Path) -> None:
    file("WEIGHT = 0.5", "neighbour_of_judge.py")
    file(
        "import neighbour_of_judge\nassert __name__ != '__main__'\n"
        "def f(completion): return neighbour_of_judge.WEIGHT\ndef g(completion): return f(completion)\n"
    )
    first, second = (load(spec) for spec in resolve(["judge.py:f", "judge.py:g"], tmp_path))
    assert second("") == first("") == 0.5 and first.__globals__ is second.__globals__


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("exakt", "no built-in: did you mean 'exact'.*'package.module:name' or 'path.py:name'"),
        ("nowhere.at_all:f", "no module 'nowhere'.*name its file instead"),
        ("actors.nowhere:f", "no module 'actors.nowhere'"),
        ("missing.py:f", "missing.py does not exist"),
        ("judge.py:jugde", "no 'jugde' at the top level of .*did you mean 'judge'"),
        ("judge.py:LIMIT", "is a int, not a function"),
        ("judge.py:Judge", r"is the class Judge; pass an instance of it, or name one: my_reward = Judge\(\)"),
        ("judge.py:by_position", "takes \\['completion'\\] by position"),
        ("broken.py:f", "broken.py raised ZeroDivisionError"),
        ("quits.py:f", "quits.py raised SystemExit"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_refused_with_what_to_do(
    file: Callable[..., Path], tmp_path: Path, target: str, message: str
) -> None:
    file("LIMIT = 3\nclass Judge: pass\ndef judge(completion): pass\ndef by_position(completion, /): pass\n")
    file("1 / 0", "broken.py")
    file("raise SystemExit(0)", "quits.py")
    with pytest.raises(RewardError, match=message):
        resolve([target], tmp_path)


def test_a_missing_dependency_of_a_module_is_told_from_a_missing_module(
    file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file("import a_library_nobody_has\ndef f(completion): return 1.0", "needs_much.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=r"importing needs_much failed: No module named 'a_library_nobody_has'"):
        resolve(["needs_much:f"], tmp_path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["judge.py:f"], r"'f' asks for 'anser'.*column of every row \(answer, level\).*mean 'answer'"),
        (["judge.py:trl"], r"requires TRL's 'trainer_state'.*default of None"),
        (["exact", "judge.py:exact"], r"two rewards are called 'exact': exact and .*judge.py:exact.*@reward\(name="),
        ([], "no reward"),
    ],
)
def test_what_asks_for_no_column_or_has_the_name_of_another_is_refused(
    file: Callable[[str], Path], tmp_path: Path, targets: list[str], message: str
) -> None:
    file(
        "def f(completion, anser, other=None): return 1.0\n"
        "def trl(completions, trainer_state): return [1.0]\n"
        "def exact(completion): return 1.0\n"
    )
    with pytest.raises(ConfigError, match=message):
        for spec in resolve(targets, tmp_path):
            check_columns(spec, {"answer", "level"})


# Functions to names.


def at_top_level(completion: str) -> float:
    return 1.0


def test_a_function_of_a_module_is_named_by_its_module() -> None:
    assert spec_of(exact) == "async_rlhf.actors.rewards.builtins.text:exact"
    assert spec_of(at_top_level) == f"{__name__}:at_top_level"


def test_what_another_process_cannot_import_is_refused_with_the_reason() -> None:
    def nested(completion: str) -> float:
        return 1.0

    class Judge:
        def judge(self, completion: str) -> float:
            return 1.0

        def __call__(self, completion: str) -> float:
            return 1.0

    refused: list[tuple[Callable[..., Any], str]] = [
        (lambda completion: 1.0, "is a lambda"),
        (nested, "is defined inside another function"),
        (functools.partial(exact, answer="4"), "is a functools.partial"),
        (Judge().judge, "not a plain function but a method"),
        (Judge(), "not a plain function but a Judge"),
    ]
    for function, reason in refused:
        with pytest.raises(RewardError, match=f"{reason}: another process cannot import it; define it with 'def'"):
            spec_of(function)


def run(*command: str) -> str:
    root = str(REPOSITORY)
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout + done.stderr


def test_a_function_typed_into_an_interactive_session_is_refused() -> None:
    text = "from async_rlhf.actors.rewards import spec_of\ndef f(completion): pass\nspec_of(f)"
    assert "typed into an interactive session, which has no file" in run("-c", text)


SCRIPT = """
from pathlib import Path
from async_rlhf.actors.rewards import resolve, reward, spec_of

@reward
def mine(completion): return 1.0
def train(): print(resolve([spec_of(mine)], Path("/")))
"""


def test_a_function_of_a_script_is_named_by_its_file(file: Callable[[str], Path]) -> None:
    path = file(SCRIPT + "if __name__ == '__main__': train()\n")
    assert f"name='mine', target='{path}:mine', kind='sync'" in run(str(path))


def test_a_function_of_a_script_that_would_run_again_when_imported_is_refused(file: Callable[[str], Path]) -> None:
    path = file(SCRIPT + "train()\n")
    expected = f"'mine' is in {path}, and importing that would run it once more; put what it runs under: if __name__"
    assert expected in run(str(path))


def test_a_reward_file_that_asks_for_its_own_rewards_when_imported_is_refused(file: Callable[[str], Path]) -> None:
    path = file("")
    path.write_text(f"from pathlib import Path\n{SCRIPT}\nresolve(['{path}:mine'], Path('/'))\n")
    with pytest.raises(RewardError, match="put what starts the run under: if __name__ == '__main__':"):
        resolve([f"{path}:mine"], Path("/"))


def test_importing_rewards_brings_in_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pydantic', 'reasoning_gym', 'math_verify', 'asyncio'}"
    assert run("-c", f"import sys, async_rlhf.actors.rewards; print({heavy} & set(sys.modules))") == "set()\n"


def test_what_only_the_calling_process_has_is_checked_as_any_other_and_takes_no_groups() -> None:
    with pytest.raises(ConfigError, match="judges groups"):
        spec_in_process("all", reward(scope="group")(lambda completions: [1.0]), None)
    with pytest.raises(ConfigError, match="asks for 'anser'"):
        spec_in_process("one", lambda completion, anser: 1.0, {"answer"})
