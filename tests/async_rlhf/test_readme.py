"""The README's command lines, programs and configuration, with smaller sizes; and the program of docs/coming-from.md."""

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
GUIDE = (REPOSITORY / "docs" / "coming-from.md").read_text()
# The only places in which a command of the test is not the README's. A first run is stopped, and a resumed one ends.
SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "max_steps"}
BENCH = ["--small", "--only", "queue", "--output", "bench.json"]
# The model that `make train-chat` fetches, and the package of one of its rewards, are not there: one that spells answers.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"
CHAT: dict[str, Any] = {
    **SIZES, "model": "speller", "max_steps": 1, "data.held_out": 4, "evaluation.at_end": True,
    "generation.max_prompt_length": 128, "generation.max_completion_length": 8,
    "rewards.functions": [str(REPOSITORY / "configs" / "chat" / "rewards.py") + ":concise"],
    "evaluation.solved_by": "concise",
}  # fmt: skip
# A page that is served until it is interrupted: tests/watch/test_page_server.py runs one.
NOT_HERE = {"watch"}
# A machine with the GPU of 24 GB that the README's configuration is for; the model's name is looked up nowhere.
GPU = "placement.hosts=[{ devices = 1, device_memory = 25769803776, cpus = 8 }]"
GPU_SIZES = {"model": "speller", "generation.max_prompt_length": 64, "generation.max_completion_length": 16}
EPISODE = {"generation.max_completion_length": 8, "generation.max_episode_length": 48}
PROBLEMS = [{"prompt": f"{n} + 2 =", "question": f"{n} + 2 =", "answer": str(n + 2)} for n in range(64)]


def block(heading: str, place: int = 0) -> str:
    """That block of code of the section that begins with this line."""
    return blocks(README, heading)[place]


def commands(heading: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in lines(block(heading)) if line.startswith("async-rlhf ")]


def sets(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={toml(value)}")]


def made(verb: str) -> list[str]:
    """The arguments of the command that this verb of make ends with."""
    dry = ["make", "--dry-run", "--no-print-directory", verb]
    done = subprocess.run(dry, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    return words[1 + next(place for place, word in enumerate(words) if word.startswith(".venv/bin/")) :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a user who has no clone; with the files that the README's relative paths lead to."""
    (tmp_path / "judge.py").write_text(block("## Your reward"))
    (tmp_path / "game.py").write_text(block("## Your environment"))
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return tmp_path


@pytest.mark.rest
def test_the_commands_do_what_they_say_in_the_order_in_which_they_stand(folder: Path, command: Callable[..., Any]) -> None:
    run, shown = folder / "runs" / "quick", dict[str, str]()
    training: Any = None
    for arguments in commands("## Use it"):
        verb = arguments[0]
        if verb in NOT_HERE:
            continue
        if verb == "train" and "--resume" in arguments:
            arguments = [*arguments, *sets(SIZES), "--set", f"max_steps={steps(run) + 2}"]
        elif verb == "train":
            training = command(*arguments, *sets(SIZES), "--set", "max_steps=100000")
            wait_for(lambda: steps(run) >= 2, "step 2")
            continue
        code, shown[verb] = command(*arguments).finish()
        assert code == 0, f"{arguments}: {shown[verb]}"
        if verb == "stop":
            code, output = training.finish()
            assert code == 0 and "drained; --resume continues" in output, output
    assert "running, step" in shown["status"] and f"all steps done: {steps(run)} steps" in shown["train"]
    assert "prompt: 'Spell" in shown["rollouts"] and (run / "plot.png").exists() and "reward" in shown["evaluate"]


def speller(folder: Path) -> None:
    """A model with a chat template, in the folder."""
    copied = shutil.copytree(REPOSITORY / "configs" / "models" / "tiny-speller", folder / "speller")
    (copied / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def test_the_configuration_for_a_gpu_is_one_that_check_accepts(folder: Path, command: Callable[..., Any]) -> None:
    speller(folder)
    (folder / "config.toml").write_text(block("## Your model on your GPU box", 1))
    check = next(line for line in lines(block("## Your model on your GPU box", 2)) if " check " in line)
    code, output = command(*shlex.split(check)[1:], *sets(GPU_SIZES), "--set", GPU).finish()
    assert code == 0 and "config.toml: good." in output, output
    assert all(f"{process}  " in output for process in ("learner", "actor-0")) and "of 24.0 GiB" in output, output


@pytest.mark.rest
def test_the_environment_plays(folder: Path, command: Callable[..., Any]) -> None:
    playing = ["try", "environment", "game.py:second_try", "--data", "problems.jsonl", "--model", "tiny-speller"]
    code, output = command(*playing, *sets(EPISODE)).finish()
    assert code == 0 and "reads   No. Try again:" in output and "turns: mean 2.0" in output, output


def test_the_program_runs_also_without_its_guard(folder: Path, command: Callable[..., Any]) -> None:
    program = block("## Your reward")
    guard, size = 'if __name__ == "__main__":', '{"max_steps": 150,'
    assert guard in program and size in program
    small = "{" + ", ".join(f"{key!r}: {value!r}" for key, value in {**SIZES, "max_steps": 2}.items()) + ","
    (folder / "program.py").write_text(program.replace(guard, "if True:").replace(size, small))
    ran = command(str(folder / "program.py"), program=True)
    code, output = ran.finish()
    assert code == 0 and "step     2/2" in output, output


@pytest.mark.rest
def test_the_program_for_those_who_come_from_trl_trains(folder: Path, command: Callable[..., Any]) -> None:
    program = blocks(GUIDE, "## To your own run in ten minutes")[0]
    smaller = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': '"tiny-speller"', '"max_steps": 200': '"max_steps": 2', '"cuda"': '"cpu"',
        '"max_completion_length": 256': '"max_completion_length": 8', '"placement": {"colocate": True},': "",
    }  # fmt: skip
    for theirs, ours in smaller.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    (folder / "program.py").write_text(program)
    code, output = command(str(folder / "program.py"), program=True).finish()
    assert code == 0 and "step     2/2" in output, output


@pytest.mark.rest
def test_make_train_chat_trains_a_chat_model(folder: Path, command: Callable[..., Any]) -> None:
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    speller(folder)
    code, output = command(*made("train-chat"), *sets(CHAT)).finish()
    assert code == 0 and "all steps done: 1 steps in runs/chat-" in output and "held-out accuracy at the end" in output, output


@pytest.mark.rest
def test_make_bench_measures_its_parts(folder: Path, command: Callable[..., Any]) -> None:
    code, output = command(*made("bench"), *BENCH, program=True).finish()
    assert code == 0 and "-- queue: measured" in output, output
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"queue"}
