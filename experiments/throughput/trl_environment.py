"""TRL in an environment of its own: made on first use, kept afterwards, never mixed with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from async_rlhf.experiments.throughput.harness import MissingError

REQUIREMENT = "trl==1.16.*"
# The same torch and transformers as ours, so that what differs is the trainer.
_PINNED_BY_CONSTRAINTS = ("torch", "transformers")
_INSTALL_LIMIT_S = 900.0


def trl_python(root: Path) -> Path:
    """The interpreter of `root/.venv-trl`, installed when it is not there or `root/constraints.txt` has changed since.

    Raises MissingError when it cannot be installed.
    """
    constraints, directory = root / "constraints.txt", root / ".venv-trl"
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if not constraints.is_file():
        raise MissingError(f"{constraints} does not exist; run this from a checkout of the repository")
    wanted = f"{REQUIREMENT}\n{constraints.read_text()}"
    if stamp.is_file() and python.exists() and stamp.read_text() == wanted:
        return python
    typer.echo(f"installing {REQUIREMENT} into {directory.name} (once, about a minute)", err=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", str(constraints)]
    _install([sys.executable, "-m", "venv", str(directory)])
    # torch first and alone, as our own environment is installed.
    _install([*pip, "torch"])
    _install([*pip, REQUIREMENT, *_PINNED_BY_CONSTRAINTS])
    stamp.write_text(wanted)
    return python


def _install(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{REQUIREMENT} cannot be installed: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise MissingError(f"{REQUIREMENT} cannot be installed: {last}")
