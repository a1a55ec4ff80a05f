"""TRL as a side: an environment of its own, made on first use and never mixed with ours, and processes in it.

`trl_side` is what runs there. What both systems are given is here too: the shipped tiny model and the directory of the clone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import typer

from async_rlhf.experiments.throughput.harness import MissingError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "tiny-speller"
REQUIREMENT = "trl==1.16.*"
# The same torch and transformers as ours, so that what differs is the trainer.
_PINNED_BY_CONSTRAINTS = ("torch", "transformers")
_INSTALL_LIMIT_S = 900.0
_STEP_LIMIT_S = 600.0


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


class TrlProcess:
    """Runs PART of `trl_side`: one step for every line it is sent. Ends when its standard input closes.

    spec: what that part reads, with its `threads`. directory: for the spec and what the process writes.
    """

    def __init__(self, python: Path, part: str, spec: Mapping[str, Any], directory: Path) -> None:
        (directory / "spec.json").write_text(json.dumps(spec))
        self._log = directory / "trl.log"
        # no network, and as many threads as ours has
        further = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(spec["threads"])}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "async_rlhf.experiments.throughput.trl_side", part, str(directory / "spec.json")],
                cwd=ROOT,
                env={**os.environ, **further},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def step(self) -> dict[str, Any]:
        """What the process reports of the step. Raises RuntimeError with the end of what TRL wrote when it fails, or takes
        longer than ten minutes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline = threading.Timer(_STEP_LIMIT_S, self._process.kill)
        deadline.start()
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
            # What libraries write there is passed over.
            answer = next((line for line in self._process.stdout if line.startswith("{")), "")
        except BrokenPipeError:
            answer = ""
        finally:
            deadline.cancel()
        if not answer:
            raise RuntimeError(f"TRL's side has ended: {self._log.read_text(errors='replace')[-2000:]}")
        reported: dict[str, Any] = json.loads(answer)
        return reported

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
