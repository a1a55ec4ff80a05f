"""The README's command lines and its program, in the order in which they stand, with smaller sizes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.async_rlhf.test_faults import steps
from tests.conftest import REPOSITORY, SMALL, toml, wait_for
from tests.documents import blocks, lines

README = (REPOSITORY / "README.md").read_text()
# The only places in which a command of the test is not the README's. A first run is stopped, and a resumed one ends.
SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "max_steps"}
TRAIN = [word for key, value in SIZES.items() for word in ("--set", f"{key}={toml(value)}")]
CHAOS = ["--kills", "5", "--seed", "3", "--set", "max_steps=40", "--set", "data.size=160"]
BENCH = ["--small", "--only", "adapters", "--output", "bench.json"]
# The model that `make train-chat` fetches, and the package of one of its rewards, are not there: one that spells answers.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"
CHAT: dict[str, Any] = {
    **SIZES, "model": "speller", "max_steps": 1, "data.held_out": 4, "evaluation.at_end": True,
    "generation.max_prompt_length": 128, "generation.max_completion_length": 8,
    "rewards.functions": [str(REPOSITORY / "experiments" / "chat" / "rewards.py") + ":concise"],
    "evaluation.solved_by": "concise",
}  # fmt: skip
# Cells of minutes, and a page that is served until it is interrupted: tests/experiments/test_sweep.py and
# tests/watch/test_page_server.py run smaller ones.
NOT_HERE = {"sweep", "watch"}

JUDGE = "def judge(completion, answer):\n    return float(answer in completion)\n"
GAME = "from async_rlhf import Score\n\n\ndef game(prompt, answer):\n    yield Score(float((yield prompt) == answer))\n"
PROBLEMS = [{"prompt": "2 + 2", "completion": "it is 4", "answer": "4"}, {"prompt": "3", "completion": "four", "answer": "3"}]


def block(heading: str) -> str:
    """The first block of code behind this line."""
    return blocks(README, heading)[0]


def commands(heading: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in lines(block(heading)) if line.startswith("async-rlhf ")]


def made(verb: str) -> list[str]:
    """The arguments of the command that this verb of make ends with, which the README names."""
    assert f"`make {verb}`" in README
    dry = ["make", "--dry-run", "--no-print-directory", verb]
    done = subprocess.run(dry, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    return words[1 + next(place for place, word in enumerate(words) if word.startswith(".venv/bin/")) :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a user who has no clone; with the files that the README's relative paths lead to."""
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return tmp_path


@pytest.mark.rest
def test_the_commands_do_what_they_say_in_the_order_in_which_they_stand(folder: Path, command: Callable[..., Any]) -> None:
    run, shown = folder / "runs" / "quick", dict[str, str]()
    training: Any = None
    for arguments in commands("## Use it"):
        verb = " ".join(arguments[:2]) if arguments[0] in ("rollouts", "try") else arguments[0]
        if verb in NOT_HERE:
            continue
        if verb == "try chaos":
            arguments = [*arguments[:3], *CHAOS]
        if verb == "train" and "--resume" in arguments:
            arguments = [*arguments, *TRAIN, "--set", f"max_steps={steps(run) + 2}"]
        elif verb == "train":
            training = command(*arguments, *TRAIN, "--set", "max_steps=100000")
            wait_for(lambda: steps(run) >= 2, "step 2")
            continue
        code, shown[verb] = command(*arguments).finish()
        assert code == 0, f"{arguments}: {shown[verb]}"
        if verb == "stop":
            code, output = training.finish()
            assert code == 0 and "drained; --resume continues" in output, output
    assert (folder / "mine" / "config.toml").exists() and "good." in shown["check"]
    assert "running, step" in shown["status"] and f"all steps done: {steps(run)} steps" in shown["train"]
    assert "prompt: 'Spell" in shown["rollouts show"] and "events in runs/quick/trace.json" in shown["rollouts trace"]
    assert "nothing was lost, nothing was trained twice" in shown["try chaos"]
    assert "judge" in shown["try reward"]


def test_the_program_runs_also_without_its_guard(folder: Path, command: Callable[..., Any]) -> None:
    program = block("Your own reward:")
    guard, size = 'if __name__ == "__main__":', '{"max_steps": 150,'
    assert guard in program and size in program
    small = "{" + ", ".join(f"{key!r}: {value!r}" for key, value in {**SIZES, "max_steps": 2}.items()) + ","
    (folder / "program.py").write_text(program.replace(guard, "if True:").replace(size, small))
    ran = command(str(folder / "program.py"), program=True)
    code, output = ran.finish()
    assert code == 0 and "step     2/2" in output, output


@pytest.mark.rest
def test_make_train_chat_trains_a_chat_model(folder: Path, command: Callable[..., Any]) -> None:
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    speller = shutil.copytree(REPOSITORY / "configs" / "models" / "tiny-speller", folder / "speller")
    (speller / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    smaller = [word for key, value in CHAT.items() for word in ("--set", f"{key}={toml(value)}")]
    code, output = command(*made("train-chat"), *smaller).finish()
    assert code == 0 and "all steps done: 1 steps in runs/chat-" in output and "held-out accuracy at the end" in output, output


@pytest.mark.rest
def test_make_bench_measures_its_parts(folder: Path, command: Callable[..., Any]) -> None:
    code, output = command(*made("bench"), *BENCH, program=True).finish()
    assert code == 0 and "-- adapters: measured" in output, output
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert [row["part"] for row in rows] == ["adapters"]
