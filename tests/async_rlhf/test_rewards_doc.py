"""docs/rewards.md does what it says: its files are written, its commands run, its configurations checked, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import load

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def write_files(folder: Path) -> None:
    for _, block in BLOCKS:
        if named := re.match(r"# file: (\S+)\n", block):
            (folder / named[1]).write_text(block[named.end() :])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command", [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if " try reward " in line]
)
def test_a_command_of_the_document_scores_everything(folder: Path, command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert " 0 failed" in result.output


@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python" and not block.startswith("# file:")])
def test_a_program_of_the_document_runs(folder: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", [block for kind, block in BLOCKS if kind == "toml"])
def test_a_configuration_of_the_document_passes_the_check_before_a_run(folder: Path, text: str) -> None:
    sections = tomllib.loads(text).items()
    quick = REPOSITORY / "configs" / "quick.toml"
    config = load(quick, {f"{section}.{key}": value for section, values in sections for key, value in values.items()})
    assert preflight(config).num_prompts > 0


def test_the_table_of_built_ins_is_complete() -> None:
    from async_rlhf.actors.rewards import BUILTINS

    assert {name for name in BUILTINS if f"| `{name}`" in TEXT} == set(BUILTINS)
