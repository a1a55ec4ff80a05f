"""Runs in jobs of Slurm, by the script that docs/machines.md shows."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from async_rlhf.run.loading import dump, load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, REPOSITORY, SMALL, assert_whole, steps, wait_for
from tests.documents import blocks
from tests.hosts.machines import Hosts
from tests.hosts.slurm import Slurm, slurm_obstacle

OBSTACLE = slurm_obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
SHOWN, SCRIPT = blocks((REPOSITORY / "docs" / "machines.md").read_text(), "### Slurm")[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all hosts; `own` below it each host has for itself."""
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Iterator[Slurm]:
    hosts = Hosts(folder / "own", mtu=65_000)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = Slurm(hosts, folder / "own", folder, path)
    yield made
    made.close()
    hosts.close()


class Job:
    """The documents' script and its configuration, which are submitted from a folder."""

    def __init__(self, slurm: Slurm, folder: Path, own: Path) -> None:
        self._slurm, self._folder, self._own = slurm, folder, own
        self.run = RunDir(folder / "runs" / "start")
        (folder / "train.sh").write_text(SCRIPT)

    def configure(self, max_steps: int) -> None:
        launch = {**tomllib.loads(SHOWN)["launch"], "hosts": ["replaced"], "directory": str(self._own / "there")}
        run = {"name": "start", "output_dir": "runs", "max_steps": max_steps, "actors.count": 1}
        config = load(QUICK, {**SMALL, **run, **{f"launch.{key}": value for key, value in launch.items()}})
        (self._folder / "config.toml").write_text(dump(config))
