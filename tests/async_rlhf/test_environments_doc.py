"""docs/environments.md does what it says: its files are written, its commands played, its configurations checked."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.inspect.episodes import Part, Trial, lines, with_specials
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import load
from tests.actors.environments.test_environment_rendering import CHATML, tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (REPOSITORY / "docs" / "environments.md").read_text(), re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for _, block in BLOCKS:
        if named := re.match(r"# file: (\S+)\n", block):
            (tmp_path / named[1]).write_text(block[named.end() :])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", [COMMANDS[0], *(pytest.param(line, marks=pytest.mark.rest) for line in COMMANDS[1:])])
def test_a_command_of_the_document_plays_every_episode(folder: Path, line: str) -> None:
    command = line.replace("async-rlhf ", f"{sys.executable} -m async_rlhf ")
    done = subprocess.run(
        command, shell=True, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    assert "2 episodes: 2 " in done.stdout and "failed" not in done.stdout


def test_an_episode_is_played_by_lines_and_shown_as_json(folder: Path) -> None:
    arguments = ["try", "environment", "calculator.py:calculator", "--data", "products.jsonl", "--json"]
    (folder / "products.jsonl").write_text('{"prompt": "12 * 3 =", "answer": "36"}\n{"prompt": "2 * 2 =", "answer": "4"}\n')
    result = CliRunner().invoke(app, arguments, input="<12 * 3>\n36\n5\n")
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in result.output.splitlines())
    assert [part["content"] for part in first["parts"]] == ["12 * 3 =", "<12 * 3>", "36\n", "36"]
    assert (first["score"]["value"], second["score"]["value"]) == (1.0, 0.0)


def played(folder: Path, target: str, row: object, turns: list[str]) -> dict[str, Any]:
    (folder / "one.jsonl").write_text(json.dumps(row))
    arguments = ["try", "environment", target, "--data", "one.jsonl", "--json"]
    result = CliRunner().invoke(app, arguments, input="\n".join(turns))
    assert result.exit_code == 0, result.output
    trial: dict[str, Any] = json.loads(result.stdout)
    return trial


PRICE = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'


@pytest.mark.parametrize(
    ("target", "answer", "turns", "read", "score"),
    [
        ("guess.py:guess", 7, ["3", "none", "9", "so: 7"], ["Higher.", "That was no number. Say one.", "Lower."], 1.0),
        ("interview.py:interview", "", ["a", "b", "c."], ["Why?", "Say it in one sentence."], None),
        ("shop.py:shop", "3", [PRICE, "it is 3"], [[{"role": "tool", "name": "price", "content": "3"}]], 1.0),
        ("shop.py:shop", "3", [PRICE[:-20]], [], 0.0),
    ],
)
def test_an_environment_of_the_document_is_played_turn_by_turn(
    folder: Path, target: str, answer: object, turns: list[str], read: list[object], score: float | None
) -> None:
    trial = played(folder, target, {"prompt": "Begin.", "answer": answer}, turns)
    assert [part["content"] for part in trial["parts"]][::2] == ["Begin.", *read]
    assert (trial["score"] and trial["score"]["value"]) == score, trial


def row(line: str) -> int:
    return int(json.loads(line)["row"])


def test_what_a_model_reads_and_writes_is_shown_with_its_special_tokens(folder: Path) -> None:
    arguments = ["try", "environment", "double.py:double", "--data", "data.jsonl", "--model", "tiny-speller"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (first, *parts) = [part for line in sorted(result.stdout.splitlines(), key=row) for part in json.loads(line)["parts"]]
    for part in (first, *parts):
        assert part["content"] == "".join(text for text, is_special in part["pieces"] if not is_special)
    assert first["pieces"] == [["twice 4 is", False]] and ["<eos>", True] in [part["pieces"][-1] for part in parts]


def test_special_tokens_stand_apart_from_text_that_looks_like_them(folder: Path) -> None:
    model = tokenizer(CHATML)
    ids = [*model("<|im_start|>user\n").input_ids, *model("<|im_end|>", split_special_tokens=True).input_ids]
    pieces = with_specials(model, ids)
    assert pieces == [("<|im_start|>", True), ("user\n<|im_end|>", False)]
    shown = lines(Trial(0, [Part("environment", "user\n<|im_end|>", pieces=pieces)], "left", None))[1]
    assert shown == "  reads   \x1b[2m<|im_start|>\x1b[0muser\\n<|im_end|>"


def test_what_is_left_and_what_fails_is_said(folder: Path) -> None:
    (folder / "bad.py").write_text("def bad(prompt):\n    yield prompt\n    raise KeyError('hm')\n")
    result = CliRunner().invoke(app, ["try", "environment", "bad.py:bad", "--data", "data.jsonl"], input="one\n")
    assert result.exit_code == 6
    assert "failed: KeyError: 'hm'" in result.output and "ended (left) without a score" in result.output


def test_the_lake_of_gymnasium_is_crossed(folder: Path) -> None:
    moves = ["down", "swim", "down", "right", "right", "down", "right"]
    trial = played(folder, "lake.py:lake", {"prompt": "Cross the lake."}, moves)
    read = [part["content"] for part in trial["parts"]][::2]
    assert read[0].startswith("Cross the lake.") and read[2] == "left, down, right or up?" and "(Right)" in read[4]
    assert trial["score"]["value"] == 1.0
    drowned = played(folder, "lake.py:lake", {"prompt": "Cross the lake."}, ["right", "down"])
    assert drowned["score"]["value"] == 0.0


def test_a_game_of_skyrl_gym_is_played_with_its_own_scores(folder: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "2 + 3?"}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"ground_truth": "5"},
        "extra_info": {},
    }
    trial = played(folder, "skyrl_game.py:skyrl", row, ["hm", "#### 4", "#### 5"])
    asked = [part["content"] for part in trial["parts"]][::2]
    assert asked[0] == row["prompt"] and "tentative numeric answer" in asked[1][0]["content"]
    # Its own: 0.2 over the most turns, 20 here, for the form; 1 for the answer.
    assert trial["score"]["value"] == pytest.approx(0.2 / 20 + 1)


@pytest.mark.parametrize("text", [block for kind, block in BLOCKS if kind == "toml"])
def test_a_configuration_of_the_document_passes_the_check_before_a_run(folder: Path, text: str) -> None:
    sections = tomllib.loads(text).items()
    given = {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
    data = {"source": "data.jsonl", "options": {}, "held_out": 0}
    own = {"environment": "double.py:double", "rewards.functions": [], "data": data}
    config = load(REPOSITORY / "configs" / "quick.toml", {**own, **given})
    assert preflight(config).num_prompts == 2


def test_a_served_environment_is_played_by_another_process_and_ends_with_a_signal(folder: Path) -> None:
    """The commands of the section about other machines."""
    served, played = (block.strip() for kind, block in BLOCKS if kind == "sh")
    command = [sys.executable, "-m", "async_rlhf", *shlex.split(served)[1:-1], "tcp://127.0.0.1:*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            line = played.replace("tcp://127.0.0.1:5600", address).replace("async-rlhf ", f"{sys.executable} -m async_rlhf ")
            done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=300)
            assert "2 episodes: 2 scored" in done.stdout, done.stdout + done.stderr
        finally:
            server.terminate()
        assert "4 requested, 4 answered, 0 refused" in server.stdout.read()
    assert server.returncode == 0
