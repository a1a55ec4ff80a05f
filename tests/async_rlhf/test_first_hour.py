"""The first hour of a user: the README's command lines, programs and configuration, with smaller sizes; the commands by the
wheel, in an empty home, beside files with the names that reinforcement learning projects have. A notebook that jupyter
executes, and the program of docs/coming-from.md.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from async_rlhf.experiments.doctor import families
from tests.conftest import REPOSITORY, SMALL, SPELLER, Start, sets, steps, wait_for
from tests.documents import blocks, lines
from tests.hub_server import hub

README = (REPOSITORY / "README.md").read_text()
GUIDE = (REPOSITORY / "docs" / "coming-from.md").read_text()
SOURCES = (
    "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE",
    "actors", "async_rlhf", "buffers", "configs", "experiments", "learner", "tests",
)  # fmt: skip
NAMES = ("actors/__init__.py", "learner/__init__.py", "experiments/__init__.py", "buffers.py")
OF_PYTHON = ("queue.py", "types.py")
# The only places in which a command of the test is not the README's. A first run is stopped, and a resumed one ends.
SIZES: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "max_steps"}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"
# A machine with the GPU of 24 GB that the README's configuration is for; the model's name is looked up nowhere.
GPU = "placement.hosts=[{ devices = 1, device_memory = 25769803776, cpus = 8 }]"
BENCH = ["queue", "publication", "--small", "--output", "bench.json"]
GPU_SIZES = {"model": "speller", "generation.max_prompt_length": 64, "generation.max_completion_length": 16}
EPISODE = {"generation.max_completion_length": 8, "generation.max_episode_length": 48}
# The model that `make train-chat` fetches, and the package of one of its rewards, are not there: one that spells answers.
CHAT: dict[str, Any] = {
    **SIZES, "model": "speller", "max_steps": 1, "data.held_out": 4, "evaluation.at_end": True,
    "generation.max_prompt_length": 128, "generation.max_completion_length": 8,
    "rewards.functions": [str(REPOSITORY / "configs" / "chat" / "rewards.py") + ":concise"],
    "evaluation.solved_by": "concise",
}  # fmt: skip
PROBLEMS = [{"prompt": f"{n} + 2 =", "question": f"{n} + 2 =", "answer": str(n + 2)} for n in range(64)]

LOSS = """%%writefile my_loss.py
from async_rlhf import loss

@loss()
def plain(inputs, weight_N):
    ratio_N = (inputs.logp_current_N.detach() - inputs.logp_proximal_N).clamp(-20, 20).exp()
    return -weight_N * ratio_N * inputs.advantage_N * inputs.logp_current_N, {}
"""
DATA = """
import pyarrow, pyarrow.parquet
words = ["cat", "dog", "sun", "tree", "moon", "bird", "lamp", "rope"]
rows = [{"question": f"Spell this word backward (example: sun -> nus): {word}", "answer": word[::-1]} for word in words * 4]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "words.parquet")
"""
TRAIN = """
import json
from async_rlhf import start, train

wanted = 4.0

class Brief:
    def __call__(self, completion):
        return -abs(len(completion) - wanted)

    def bound(self, completions, prompts):
        return [float(len(each) > 0) for each in completions]

def exact(completion, answer):
    return float(completion.strip() == answer)

def lengths(prompts, completions, **columns):  # TRL's form, unchanged
    return [None if not each else len(each) / 12 for each in completions]

async def slowly(completion):
    return 0.5

settings = {
    "model": "qwen3",
    "max_steps": 2,
    "data": {"source": "words.parquet", "options": {}, "columns": {"prompt": "question"}, "held_out": 0},
    "generation.group_size": 4,
    "learner": {"batch_size": 8, "learning_rate": 1e-3},
    "loss.kind": "my_loss.py:plain",
}
rewards = [exact, lengths, slowly, Brief(), Brief().bound, lambda completion: 0.1]
result = train("quick", rewards=rewards, overrides=settings)
last = result.metrics[-1]
assert last["rewards/slowly/mean"] == 0.5 and last["rewards/failed_ratio"] == 0.0
assert {"rewards/exact/mean", "rewards/lengths/mean", "rewards/bound/mean", "rewards/reward_5/mean"} <= set(last), sorted(last)
result
"""
ITERATE = """
from async_rlhf import Score, environment

@environment(max_turns=3)
def insists(prompt, answer):
    first = yield prompt
    again = yield "Again: "
    yield Score(float(again.strip() == answer) - abs(len(first) - wanted))

episodes = {**settings, "rewards.functions": [], "generation.max_episode_length": 64, "max_steps": 3}
with start("quick", environment=insists, overrides=episodes, overwrite=True) as run:
    records = list(run)
steps, turns = ([record[name] for record in records] for name in ("step", "episodes/mean_turns"))
print(json.dumps({"steps": steps, "turns": turns, "model": run.model().is_dir()}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The sdist of these sources, made from a copy, for a build leaves files; its wheel; and where that is installed."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "copy").mkdir()
    for name in SOURCES:
        source, target = REPOSITORY / name, folder / "copy" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=folder / "copy")
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-compile", "--target", str(folder / "site"), str(wheel), cwd=folder)
    return sdist, wheel, folder / "site"


@pytest.fixture
def site(built: tuple[Path, Path, Path]) -> Path:
    return built[2]


@pytest.fixture
def project(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with foreign modules, and an empty home."""
    for name in NAMES:
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('this is not the file that was meant')\n")
    (tmp_path / "home").mkdir()
    for variable, value in {"HOME": tmp_path / "home", "XDG_CACHE_HOME": tmp_path / "home/.cache", "PYTHONPATH": site}.items():
        monkeypatch.setenv(variable, str(value))
    return tmp_path / "project"


def test_sdist_and_wheel_have_the_package_its_configurations_and_nothing_else(built: tuple[Path, Path, Path]) -> None:
    sdist, wheel, _ = built
    with tarfile.open(sdist) as sources:
        folders = {name.split("/")[1] for name in sources.getnames() if name.count("/") > 1}
    assert folders == {"async_rlhf", "async_rlhf.egg-info"}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"async_rlhf"}
    assert not [name for name in names if "test" in Path(name).name], "the wheel has tests"
    for folder in ("configs", "configs/plans", "experiments/staleness"):
        assert {f"async_rlhf/{folder}/{file.name}" for file in (REPOSITORY / folder).glob("*.toml")} <= set(names)


def block(heading: str, place: int = 0) -> str:
    """That block of code of the README's section that begins with this line."""
    return blocks(README, heading)[place]


@pytest.mark.rest
def test_the_commands_do_what_they_say_in_the_order_in_which_they_stand_and_no_file_of_the_folder_hides_a_module(
    project: Path, site: Path
) -> None:
    for name in OF_PYTHON:
        (project / name).write_text("raise RuntimeError('this is not the file that was meant')\n")
    program, quick, shown = str(site / "bin" / "async-rlhf"), project / "runs" / "quick", dict[str, str]()
    training: Any = None
    try:
        for line in ["async-rlhf init mine", "async-rlhf check mine/config.toml", *lines(block("## Use it"))]:
            _, verb, *rest = shlex.split(line)
            if verb == "watch":  # it serves until it is interrupted: tests/watch/test_page_server.py runs one
                continue
            if verb == "train" and "--resume" in rest:
                rest = [*rest, *sets(SIZES), "--set", f"max_steps={steps(quick) + 2}"]
            elif verb == "train":
                command = [program, verb, *rest, *sets(SIZES), "--set", "max_steps=100000"]
                training = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
                wait_for(lambda: steps(quick) >= 2, "step 2")
                continue
            shown[verb] = run(program, verb, *rest, cwd=project)
            if verb == "stop":
                output, _ = training.communicate(timeout=300)
                assert training.returncode == 0 and "drained; --resume continues" in output, output
    finally:
        if training is not None:
            training.kill()
            training.communicate()
    assert f"wrote {Path('mine') / 'config.toml'}" in shown["init"] and "mine/config.toml: good." in shown["check"]
    assert "running, step" in shown["status"] and f"all steps done: {steps(quick)} steps" in shown["train"]
    assert "prompt: 'Spell" in shown["rollouts"] and "reward" in shown["evaluate"]
    assert (quick / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert f'model = "{site}/async_rlhf/configs/models/tiny-speller"' in (quick / "config.toml").read_text()
    grid = "from async_rlhf.experiments.staleness.config import load_sweep; print(len(load_sweep('quick')[1]))"
    assert run(sys.executable, "-c", grid, cwd=project) == "6\n"


@pytest.mark.rest
@pytest.mark.timeout(5400)
def test_a_stranger_has_a_model_on_the_hub_and_its_run_in_trackio_by_the_readme_alone(
    built: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """In two empty environments: the commands as they stand, but for the wheel, the size, and what serves until its end."""
    _, wheel, _ = built
    index = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "tomli-w"]
    if subprocess.run(index, stdin=subprocess.DEVNULL).returncode != 0:
        pytest.skip("there is no package index")
    shutil.copy(REPOSITORY / "constraints.txt", tmp_path)
    with hub() as server:
        own = {"PIP_NO_INDEX": "0", "PYTHONPATH": "", "HF_HOME": str(tmp_path / "hf"), "TRACKIO_DIR": str(tmp_path / "trackio")}
        *commands, shows = lines(block("## From nothing to the Hub"))
        said = ""
        for line in [*commands, commands[-1]]:  # what is tracked again is sent once
            words = [{".": str(wheel), "python3": sys.executable}.get(word, word) for word in shlex.split(line)]
            words += [*sets(SIZES), "--set", "max_steps=2"] if " train " in line else []
            program = [str(tmp_path / words[0]) if "/bin/" in words[0] and words[0] != sys.executable else words[0], *words[1:]]
            said += run(*program, cwd=tmp_path, **own, **({} if " --to trackio" in line else server.environment))
    assert "all steps done: 2 steps" in said and said.count("trackio has 2 steps and 0 evaluations") == 2
    assert (tmp_path / shlex.split(shows)[0]).is_file()
    [files] = server.commits["OWNER/NAME"]
    model = tmp_path / "runs" / "quick" / "checkpoints" / "latest" / "model"
    assert files["model.safetensors"] == (model / "model.safetensors").read_bytes() and b"async-rlhf" in files["README.md"]
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "runs" / "quick" / "metrics.jsonl").read_text().splitlines()]
    with closing(sqlite3.connect(tmp_path / "trackio" / "async-rlhf.db")) as database:
        sent = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics")]
    assert [(step, values["reward"]) for step, values in sent if "reward" in values] == [*enumerate(rewards, 1)]
    assert len([values for _, values in sent if "rollouts" in values]) == 1


def outputs(cell: Any, kind: str) -> str:
    """What a cell shows: its stream of text, or its data of one kind."""
    return "".join(each.get("text", "") if kind == "text" else each.get("data", {}).get(kind, "") for each in cell.outputs)


@pytest.mark.rest
def test_a_notebook_trains_another_family_with_what_its_cells_define(project: Path) -> None:
    families.model("qwen3", vocab_size=99, eos_token_id=1).save_pretrained(project / "qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SPELLER / name, project / "qwen3")
    cells = [nbformat.v4.new_code_cell(text) for text in (LOSS, DATA, TRAIN, ITERATE)]
    book = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(
        book, timeout=300, startup_timeout=300, kernel_name="python3", resources={"metadata": {"path": str(project)}}
    ).execute()
    saved, _, trained, iterated = book.cells
    assert "Writing my_loss.py" in outputs(saved, "text")
    assert "TrainResult(run_dir='runs/quick', steps=2, finished=True" in outputs(trained, "text/plain")
    for cell, step in ((trained, 2), (iterated, 3)):
        shown = outputs(cell, "text/html")
        assert f"<b>step {step} of {step}</b>" in shown and f"sample of step {step}" in shown, shown
    assert '{"steps": [1, 2, 3], "turns": [2.0, 2.0, 2.0], "model": true}' in outputs(iterated, "text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a user who has no clone; with the files that the README's relative paths lead to."""
    (tmp_path / "judge.py").write_text(block("## Your reward"))
    (tmp_path / "game.py").write_text(block("## Your environment"))
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return tmp_path


def speller(folder: Path) -> None:
    """A model with a chat template, in the folder."""
    copied = shutil.copytree(SPELLER, folder / "speller")
    (copied / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def test_the_configuration_for_a_gpu_is_one_that_check_accepts(folder: Path, command: Start) -> None:
    speller(folder)
    (folder / "config.toml").write_text(block("## Your model on your GPU box", 1))
    check = next(line for line in lines(block("## Your model on your GPU box", 2)) if " check " in line)
    checked = command(*shlex.split(check)[1:], *sets(GPU_SIZES), "--set", GPU)
    checked.ends_with(0, "config.toml: good.", "learner  ", "actor-0  ", "of 24.0 GiB")


@pytest.mark.rest
def test_the_environment_plays(folder: Path, command: Start) -> None:
    playing = ["try", "environment", "game.py:second_try", "--data", "problems.jsonl", "--model", "tiny-speller"]
    command(*playing, *sets(EPISODE)).ends_with(0, "reads   No. Try again: ", "turns: mean 2.0")


@pytest.mark.rest
def test_the_program_runs_also_without_its_guard(folder: Path, command: Start) -> None:
    program = block("## Your reward")
    guard, size = 'if __name__ == "__main__":', '{"max_steps": 150,'
    assert guard in program and size in program
    small = "{" + ", ".join(f"{key!r}: {value!r}" for key, value in {**SIZES, "max_steps": 2}.items()) + ","
    (folder / "program.py").write_text(program.replace(guard, "if True:").replace(size, small))
    command(str(folder / "program.py"), program=True).ends_with(0, "step     2/2")


@pytest.mark.rest
def test_the_program_for_those_who_come_from_trl_trains(folder: Path, command: Start) -> None:
    program = blocks(GUIDE, "## To your own run in ten minutes")[0]
    smaller = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': '"tiny-speller"', '"max_steps": 200': '"max_steps": 2', '"cuda"': '"cpu"',
        '"max_completion_length": 256': '"max_completion_length": 8', '"placement": {"colocate": True},': "",
    }  # fmt: skip
    for theirs, ours in smaller.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    (folder / "program.py").write_text(program)
    command(str(folder / "program.py"), program=True).ends_with(0, "step     2/2")


def made(verb: str) -> list[str]:
    """The arguments of the command that this verb of make ends with."""
    dry = ["make", "--dry-run", "--no-print-directory", verb]
    done = subprocess.run(dry, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    return words[1 + next(place for place, word in enumerate(words) if word.startswith(".venv/bin/")) :]


@pytest.mark.rest
def test_make_train_chat_trains_a_chat_model(folder: Path, command: Start) -> None:
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    speller(folder)
    trained = command(*made("train-chat"), *sets(CHAT))
    trained.ends_with(0, "all steps done: 1 steps in runs/chat-", "held-out accuracy at the end")


@pytest.mark.rest
def test_make_bench_measures_its_parts(folder: Path, command: Start) -> None:
    command(*made("bench"), *BENCH, program=True).ends_with(0, *(f"-- {part}: measured" for part in BENCH[:2]))
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert {row["part"] for row in rows} == set(BENCH[:2])
