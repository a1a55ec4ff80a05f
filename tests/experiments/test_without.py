"""The system without its experiments: a copy of the tree that lacks them imports, is typed, and its command line works."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.rest

# An editable installation would find there what the copy lacks.
ALONE = "import sys; sys.meta_path = [each for each in sys.meta_path if '__editable__' not in str(each)]\n"
IMPORTS = """
import importlib, pkgutil, async_rlhf
elsewhere = ("vllm", "to_trackio")  # their packages are not installed everywhere, or not beside the others
found = [each.name for each in pkgutil.walk_packages(async_rlhf.__path__, "async_rlhf.")]
names = [name for name in found if not any(each in name for each in elsewhere)]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert len(names) > 200, names
assert not [name for name in sys.modules if name.startswith("async_rlhf.experiments")]
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the copy."""
    copy = tmp_path_factory.mktemp("rest")
    for name in ("actors", "async_rlhf", "buffers", "configs", "learner"):
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "async_rlhf" / "experiments").unlink()
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    return copy


def run(rest: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *arguments], cwd=rest, capture_output=True, text=True, timeout=900, check=False)
    return done.returncode, done.stdout + done.stderr


def command(rest: Path, *arguments: str) -> tuple[int, str]:
    """What a command of the copy prints, and its exit code."""
    code = f"{ALONE}sys.argv[0] = 'async-rlhf'\nfrom async_rlhf.cli.commands import main\nmain()"
    return run(rest, "-c", code, *arguments)


def test_every_module_imports(rest: Path) -> None:
    code, said = run(rest, "-c", ALONE + IMPORTS)
    assert code == 0, said


def test_it_is_typed(rest: Path) -> None:
    code, said = run(rest, "-m", "mypy", "--cache-dir", str(rest / "cache"))
    assert code == 0, said


def test_its_command_line_works_and_names_what_is_not_there(rest: Path) -> None:
    code, said = command(rest, "--help")
    assert code == 0 and "train" in said
    for config in ("quick", "tools"):
        code, said = command(rest, "check", config)
        assert code == 0, said
    for arguments in (["sweep", "quick"], ["report", "runs"], ["doctor"]):
        code, said = command(rest, *arguments)
        assert code == 3 and f"has no {arguments[0]!r}" in said, said
