"""docs/rewards.md and docs/environments.md do what they say: their files are written, commands run, configurations checked."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.rewards import BUILTINS
from async_rlhf.inspect.episodes import EpisodePart, EpisodeTrial, lines, with_specials
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from tests.actors.environments.test_environment_rendering import CHATML, tokenizer
from tests.conftest import QUICK, REPOSITORY, output_of, stdout_of
from tests.documents import Page

REWARDS, ENVIRONMENTS = Page("rewards.md"), Page("environments.md")
FIRST, *OTHERS = ENVIRONMENTS.commands()
PLAYED: dict[str, Any] = {"rewards.functions": [], "data.source": "", "data.options": {}, "data.held_out": 0}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rewards(here: Path) -> Path:
    """A directory with the files of the page about rewards."""
    REWARDS.write_files(here)
    return here


@pytest.fixture
def folder(here: Path) -> Path:
    """A directory with the files of the page about environments."""
    ENVIRONMENTS.write_files(here)
    return here


def shell(line: str, folder: Path) -> str:
    """What a line prints."""
    line = line.replace("async-rlhf ", f"{sys.executable} -m async_rlhf ")
    variables = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(line, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", [each for each in REWARDS.commands() if " try reward " in each])
def test_a_command_about_rewards_scores_everything(rewards: Path, line: str) -> None:
    assert " 0 failed" in output_of(0, *shlex.split(line)[1:])


@pytest.mark.parametrize("line", [FIRST, *(pytest.param(line, marks=pytest.mark.rest) for line in OTHERS)])
def test_a_command_about_environments_plays_every_episode(folder: Path, line: str) -> None:
    played = shell(line, folder)
    assert "2 episodes: 2 " in played and "failed" not in played


@pytest.mark.parametrize("code", REWARDS.of("python"))
def test_a_program_runs(rewards: Path, code: str) -> None:
    shell(shlex.join([sys.executable, "-c", code]), rewards)


@pytest.mark.parametrize(
    ("page", "own", "text"),
    [*(("rewards", {}, each) for each in REWARDS.of("toml")), *(("folder", PLAYED, each) for each in ENVIRONMENTS.of("toml"))],
)
def test_a_configuration_passes_the_check_before_a_run(
    request: pytest.FixtureRequest, page: str, own: dict[str, Any], text: str
) -> None:
    request.getfixturevalue(page)
    given = {f"{section}.{key}": value for section, values in tomllib.loads(text).items() for key, value in values.items()}
    assert preflight(load(QUICK, {**own, **given})).num_prompts > 0


def test_the_table_of_built_in_rewards_is_complete() -> None:
    assert {name for name in BUILTINS if f"| `{name}`" in REWARDS.text} == set(BUILTINS)


PRICE = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
LAKE = {"prompt": "Cross the lake."}
GSM8K = {
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"ground_truth": "5"},
    "extra_info": {},
}


@pytest.mark.parametrize(
    ("target", "row", "turns", "read", "score"),
    [
        ("guess.py:guess", {"answer": 7}, ["3", "none", "9", "so: 7"], {1: "Higher.", 2: "no number.", 3: "Lower."}, 1.0),
        ("interview.py:interview", {"answer": ""}, ["a", "b", "c."], {1: "Why?", 2: "Say it in one sentence."}, None),
        ("shop.py:shop", {"answer": "3"}, [PRICE, "it is 3"], {1: "'role': 'tool', 'name': 'price', 'content': '3'"}, 1.0),
        ("shop.py:shop", {"answer": "3"}, [PRICE[:-20]], {}, 0.0),
        (
            "lake.py:lake", LAKE, ["down", "swim", "down", "right", "right", "down", "right"],
            {0: "Cross the lake.", 2: "left, down, right or up?", 4: "(Right)"}, 1.0,
        ),
        ("lake.py:lake", LAKE, ["right", "down"], {}, 0.0),
        # its own: 0.2 over the most turns, 20 here, for the form; 1 for the answer
        ("skyrl_game.py:skyrl", GSM8K, ["hm", "#### 4", "#### 5"], {1: "tentative numeric answer"}, 0.2 / 20 + 1),
    ],
)  # fmt: skip
def test_an_environment_is_played_turn_by_turn(
    folder: Path, target: str, row: dict[str, Any], turns: list[str], read: dict[int, str], score: float | None
) -> None:
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "Begin.", **row}))
    arguments = ["try", "environment", target, "--data", "one.jsonl", "--json"]
    trial = json.loads(stdout_of(*arguments, input="\n".join(turns)))
    shown = [str(part["content"]) for part in trial["parts"]][::2]
    assert all(text in shown[number] for number, text in read.items()), shown
    assert (trial["score"] and trial["score"]["value"]) == pytest.approx(score)


def test_what_a_model_reads_and_writes_is_shown_with_its_special_tokens(folder: Path) -> None:
    arguments = ["try", "environment", "double.py:double", "--data", "data.jsonl", "--model", "tiny-speller", "--json"]
    trials = sorted(map(json.loads, stdout_of(*arguments).splitlines()), key=lambda trial: trial["row"])
    (first, *others) = [part for trial in trials for part in trial["parts"]]
    for part in (first, *others):
        assert part["content"] == "".join(text for text, is_special in part["pieces"] if not is_special)
    assert first["pieces"] == [["twice 4 is", False]] and ["<eos>", True] in [part["pieces"][-1] for part in others]


def test_special_tokens_stand_apart_from_text_that_looks_like_them() -> None:
    model = tokenizer(CHATML)
    ids = [*model("<|im_start|>user\n").input_ids, *model("<|im_end|>", split_special_tokens=True).input_ids]
    pieces = with_specials(model, ids)
    assert pieces == [("<|im_start|>", True), ("user\n<|im_end|>", False)]
    shown = lines(EpisodeTrial(0, [EpisodePart("environment", "user\n<|im_end|>", pieces=pieces)], "left", None))[1]
    assert shown == "  reads   \x1b[2m<|im_start|>\x1b[0muser\\n<|im_end|>"


def test_what_is_left_and_what_fails_is_said(folder: Path) -> None:
    (folder / "bad.py").write_text("def bad(prompt):\n    yield prompt\n    raise KeyError('hm')\n")
    output = output_of(6, "try", "environment", "bad.py:bad", "--data", "data.jsonl", input="one\n")
    assert "failed: KeyError: 'hm'" in output and "ended (left) without a score" in output


def test_a_served_environment_is_played_by_another_process_and_ends_with_a_signal(folder: Path) -> None:
    """The commands of the section about other machines."""
    served, played = (block.strip() for block in ENVIRONMENTS.of("sh"))
    command = [sys.executable, "-m", "async_rlhf", *shlex.split(served)[1:-1], "tcp://127.0.0.1:*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            assert "2 episodes: 2 scored" in shell(played.replace("tcp://127.0.0.1:5600", address), folder)
        finally:
            server.terminate()
        assert "4 requested, 4 answered, 0 refused" in server.stdout.read()
    assert server.returncode == 0
