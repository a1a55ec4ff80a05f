"""The first hour of a user: the wheel in an empty home, beside files with the names that reinforcement learning projects have.

From the command line (init, check, train, status, plot, evaluate), and from a notebook that jupyter executes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from async_rlhf.experiments.doctor import families
from tests.conftest import REPOSITORY

SOURCES = (
    "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE",
    "actors", "async_rlhf", "buffers", "configs", "experiments", "learner", "tests",
)  # fmt: skip
NAMES = ("actors/__init__.py", "learner/__init__.py", "experiments/__init__.py", "buffers.py")
OF_PYTHON = ("queue.py", "types.py")

LOSS = """%%writefile my_loss.py
from async_rlhf import loss

@loss()
def plain(inputs, weight_N, config):
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

def exact(completion, answer):
    return float(completion.strip() == answer)

settings = {
    "model": "qwen3",
    "max_steps": 2,
    "data": {"source": "words.parquet", "options": {}, "columns": {"prompt": "question"}, "held_out": 0},
    "generation.group_size": 4,
    "learner": {"batch_size": 8, "learning_rate": 1e-3},
    "loss.kind": "my_loss.py:plain",
}
result = train("quick", rewards=[exact, Brief(), lambda completion: 0.1], overrides=settings)
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
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
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


@pytest.mark.rest
def test_the_commands_of_the_wheel_train_what_init_writes_and_no_file_of_the_folder_hides_a_module(
    project: Path, site: Path
) -> None:
    for name in OF_PYTHON:
        (project / name).write_text("raise RuntimeError('this is not the file that was meant')\n")
    (project / "my_rewards.py").write_text("def short(completion):\n    return -len(completion) / 32\n")

    def command(*arguments: str) -> str:
        return run(str(site / "bin" / "async-rlhf"), *arguments, cwd=project)

    assert f"wrote {Path('start') / 'config.toml'}" in command("init", "start")
    assert command("check", "quick").startswith("quick: good. 4096 training prompts")
    grid = "from async_rlhf.experiments.staleness.config import load_sweep; print(len(load_sweep('quick')[1]))"
    assert run(sys.executable, "-c", grid, cwd=project) == "6\n"
    settings = ["max_steps=2", "learner.batch_size=16", "data.held_out=4", "evaluation.at_start=false", "name=two"]
    rewards = f'rewards.functions=["{project}/start/rewards.py:backward", "my_rewards:short"]'
    sets = [word for each in [*settings, rewards] for word in ("--set", each)]
    assert f"all steps done: 2 steps in {Path('runs') / 'two'}" in command("train", "start/config.toml", *sets)
    assert f'model = "{site}/async_rlhf/configs/models/tiny-speller"' in (project / "runs" / "two" / "config.toml").read_text()

    assert json.loads(command("status", "runs/two", "--json"))["state"] == "finished"
    command("plot", "runs/two", "--out", "two.png")
    assert (project / "two.png").read_bytes().startswith(b"\x89PNG")
    judged = json.loads(command("evaluate", "runs/two/checkpoints/best/model", "start/config.toml", *sets, "--json"))
    (at_end,) = [json.loads(line) for line in (project / "runs/two/evaluations.jsonl").read_text().splitlines()]
    assert (judged["mean_reward"], judged["num_prompts"]) == (at_end["mean_reward"], 4)


def outputs(cell: Any, kind: str) -> str:
    """What a cell shows: its stream of text, or its data of one kind."""
    return "".join(each.get("text", "") if kind == "text" else each.get("data", {}).get(kind, "") for each in cell.outputs)


@pytest.mark.rest
def test_a_notebook_trains_another_family_with_what_its_cells_define(project: Path) -> None:
    families.model("qwen3", vocab_size=99, eos_token_id=1).save_pretrained(project / "qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "configs" / "models" / "tiny-speller" / name, project / "qwen3")
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
