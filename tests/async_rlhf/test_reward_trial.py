"""`try reward` and `serve reward`: what they say, and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf import Score, try_rewards
from async_rlhf.actors.rewards.builtins.text import exact
from async_rlhf.buffers.errors import ConfigError, DeadlineError
from async_rlhf.cli.commands import app
from async_rlhf.inspect.trials import failures
from tests.conftest import QUICK

JUDGES = """
from async_rlhf import Score, reward
def quality(completion, answer):
    if completion == "boom": raise ValueError("no")
    if completion == "skip": return None
    return Score(float(completion) / 10, metrics={"length": len(completion)})

@reward(scope="group")
def best(completions): return [float(c == max(completions)) for c in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judges.py").write_text(JUDGES)
    data = [{"completion": text, "answer": "4"} for text in ("1", "2", "10", "boom", "skip")]
    lines = "".join(json.dumps(each) + "\r\n" for each in data)
    (tmp_path / "data.jsonl").write_text(lines, encoding="utf-8-sig")  # as some editors write it
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["try", "reward", *arguments])
    return result.exit_code, result.output


def test_one_reward_is_a_list_of_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'rewards\.weigths': did you mean 'rewards\.weights'"):
        try_rewards(exact, [], weigths={})
    for one in (exact, "exact"):
        assert [each.name for each in try_rewards(one, [{"completion": "4", "answer": "4"}]).rewards] == ["exact"]


def test_a_trial_counts_values_and_failures_and_draws_a_histogram(folder: Path) -> None:
    code, output = invoke("judges.py:quality", "--data", "data.jsonl", "--json")
    (told,) = json.loads(output)["rewards"]
    assert code == 6  # a score failed: no run should depend on this reward yet
    assert (told["num_scored"], told["num_not_applicable"], told["failures"]) == (3, 1, {"ValueError: no": 1})
    assert math.isclose(told["mean"], 1.3 / 3) and (told["lowest"], told["highest"]) == (0.1, 1.0)
    assert sum(count for _, _, count in told["histogram"]) == 3 and told["metrics"] == {"length": pytest.approx(4 / 3)}
    assert set(told["seconds"]) == {"mean", "p50", "p95", "max"}
    code, output = invoke("judges.py:quality", "--data", "data.jsonl")
    assert "quality: 3 scored, 1 not applicable, 1 failed" in output and "failed 1 times: ValueError: no" in output
    assert code == 6 and invoke("judges.py:quality", "--data", "data.jsonl", "--limit", "3")[0] == 0


def test_failures_that_differ_in_an_address_are_counted_together() -> None:
    scores = [Score(failure=f"bad {each}") for each in (object(), object(), 7)]
    assert failures([*scores, Score(1.0)]) == {"bad <object object at 0x...>": 2, "bad 7": 1}


def test_a_trial_says_that_a_function_lacks_its_return(folder: Path) -> None:
    (folder / "forgetful.py").write_text("def forgetful(completion):\n    len(completion)\n")
    code, output = invoke("forgetful.py:forgetful", "--data", "data.jsonl")
    assert code == 6 and "it returned None for every completion" in output and "Is a `return` missing?" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["judges.py:qualty"], "did you mean 'quality'"),
        (
            ["judges.py:quality", "--set", "scoring.timeout=1"],
            "unknown key 'scoring.timeout': did you mean 'scoring.timeout_s'",
        ),
        (["judges.py:quality", "--set", "scoring.timeout_s=-1"], "scoring.timeout_s = -1"),
        (["length", "--set", "options.length.target=1", "--set", "options.length.tolerance=1"], "asks for 'completion_ids'"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_way_out(folder: Path, arguments: list[str], message: str) -> None:
    code, output = invoke(*arguments, "--data", "data.jsonl")
    assert code == 3 and message in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no completion"),
        ('{"completions": "ab"}', "'completions' must be a list, as long as"),
        ('{"completions": ["a", "b"], "sampled": [[true]]}', "'completions' must be a list, as long as"),
        ('{"answer": "4"}\n', "object 1 of the data has no 'completion'"),
        ("{", "cannot be read"),
    ],
)
def test_data_without_completions_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "data.jsonl").write_text(content)
    code, output = invoke("judges.py:best", "--data", "data.jsonl")
    assert code == 3 and message in output


def test_the_same_from_python_with_functions_and_groups(folder: Path) -> None:
    sys.modules.pop("judges", None)
    groups = [{"completions": ["1", "2"], "answer": "2"}, {"completions": ["5"], "answer": "4"}]
    trial = try_rewards([exact, "judges.py:best"], groups)
    assert [each["best"] for each in trial.scores] == [Score(0.0), Score(1.0), Score(1.0)]
    assert [each["exact"].value for each in trial.scores] == [0.0, 1.0, 0.0] and trial.num_failed == 0


def test_what_no_other_process_can_import_is_tried_beside_what_can(folder: Path) -> None:
    data = [{"completion": "3", "answer": "4"}, {"completion": "four", "answer": "4"}]
    trial = try_rewards([lambda completion, answer: abs(int(completion) - int(answer)), "exact"], data)
    assert [each["exact"].value for each in trial.scores] == [0.0, 0.0]
    assert trial.scores[0]["reward_0"].value == 1.0 and "ValueError" in str(trial.scores[1]["reward_0"].failure)
    with pytest.raises(ConfigError, match=r"reward 'reward_0' asks for 'anser'.*did you mean 'answer'"):
        try_rewards(lambda completion, anser: 1.0, data)


def test_each_reward_asks_for_columns_of_the_sources_that_it_judges(folder: Path) -> None:
    (folder / "other.py").write_text("def named(completion, word):\n    return 1.0\n")
    data = [{"completion": "4", "answer": "4", "source": "sums"}, {"completion": "4", "word": "four", "source": "words"}]
    rewards = ["exact", "other.py:named"]
    found = try_rewards(rewards, data, by_source={"sums": ["exact"], "words": ["named"]})
    assert [(each.num_scored, each.num_not_applicable) for each in found.rewards] == [(1, 1), (1, 1)]
    with pytest.raises(ConfigError, match="reward 'exact'"):
        try_rewards(rewards, data, by_source={"sums": ["exact"]})


def test_a_reward_that_never_answers_ends_the_trial_with_a_name(folder: Path) -> None:
    (folder / "slow.py").write_text("async def slow(completion):\n    import asyncio\n    await asyncio.sleep(100)\n")
    with pytest.raises(DeadlineError, match="waited 0 s for the scores of 1 completions"):
        try_rewards(["slow.py:slow"], [{"completion": "x"}], patience_s=0.3, scoring={"timeout_s": 60})


def test_a_reward_is_tried_beside_files_that_are_named_as_modules(folder: Path) -> None:
    for name in ("socket", "random", "signal", "pickle", "json", "multiprocessing"):
        (folder / f"{name}.py").write_text(f"raise ImportError('the {name} of the user')\n")
    (folder / "rows.jsonl").write_text('{"prompt": "?", "completion": "4", "answer": "4"}\n')
    (folder / "bin").mkdir()  # as of the installed command, which has this on its path and not the folder
    (folder / "bin" / "async-rlhf").write_text(
        "from async_rlhf.cli.commands import main\nif __name__ == '__main__':\n    main()\n"
    )
    command = [sys.executable, "bin/async-rlhf", "try", "reward", "judges.py:quality", "--data", "rows.jsonl"]
    tried = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert tried.returncode == 0 and "1 scored" in tried.stdout, tried.stderr


def test_a_served_reward_is_asked_by_another_process_and_ends_with_a_signal(folder: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "serve", "reward", "judges.py:quality", "--address", "tcp://127.0.0.1:*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            trial = try_rewards(["remote"], [{"completion": "3", "answer": ""}], options={"remote": {"address": address}})
            assert trial.scores[0]["remote"] == Score(0.3, metrics={"length": 1.0})
        finally:
            server.terminate()
        assert "1 answered" in server.stdout.read()
    assert server.returncode == 0


CONFIG = """
model = "{model}"
max_steps = 1
[data]
source = "chat.jsonl"
held_out = 0
[rewards]
functions = [{functions}]
[learner]
batch_size = 8
"""
CALLED = """
from async_rlhf import reward
def conv(completions, answer): return [float(len(c[0]["content"]) + len(a)) for c, a in zip(completions, answer)]
def text(completions): return [float(len(c.split())) for c in completions]
def none(completion): return None
def noted(completion, note): return len(note)
@reward(scope="group")
def share(completions): return [1 / len(completions)] * len(completions)
"""


def checked(folder: Path, *functions: str, **changed: Any) -> tuple[int, str]:
    model = shutil.copytree(QUICK.parent / "models" / "tiny-speller", folder / "model", dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [
        {"prompt": [{"role": "user", "content": f"say {n}"}], "answer": "4", "note": None if n == 5 else ""} for n in range(8)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "called.py").write_text(CALLED)
    names = ", ".join(f'"called.py:{name}"' for name in functions)
    (folder / "run.toml").write_text(CONFIG.format(model=model, functions=names))
    sets = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["check", "run.toml", *sets])
    return result.exit_code, " ".join(result.output.split())


def test_check_calls_every_reward_on_a_made_up_completion_of_the_data(folder: Path) -> None:
    code, output = checked(folder, "conv", "none", "share")
    assert code == 0 and "run.toml: good." in output, output
    for name, value in (("conv", "18.0"), ("none", "None"), ("share", "0.125")):
        assert f"reward {name} on a made-up completion of the prompt" in output
        assert f"'content': 'say 0'}}]\": {value}" in output


def test_check_does_not_call_good_what_would_end_the_run_by_a_reward_that_fails(folder: Path) -> None:
    code, output = checked(folder, "text")
    assert code == 6 and "good." not in output, output
    assert "reward 'text' fails on a made-up completion" in output and "'list' object has no attribute 'split'" in output
    code, output = checked(folder, "text", **{"rewards.max_failed_ratio": 1.0})
    assert code == 0 and "no attribute 'split'" in output, output
    code, output = checked(folder, "noted")
    assert code == 6 and "'say 5'" in output and "'NoneType' has no len()" in output, output
