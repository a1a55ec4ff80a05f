"""Runs in jobs of Slurm, by the script that docs/machines.md shows."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    (folder / "own").mkdir()
    hosts = Hosts(folder / "own", mtu=65_000)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = Slurm(hosts, folder / "own", folder, path)
    yield made
    made.close()
    hosts.close()


class Job:
    """The documents' script, submitted once or several times beside a configuration."""

    def __init__(self, slurm: Slurm, folder: Path, own: Path) -> None:
        self._slurm, self._own, self._script = slurm, own, folder / "train.sh"
        self.run = RunDir(folder / "runs" / "start")
        folder.mkdir()
        self._script.write_text(SCRIPT)

    def configure(self, max_steps: int) -> None:
        launch = {**tomllib.loads(SHOWN)["launch"], "hosts": ["replaced"], "directory": str(self._own / "there")}
        run = {"name": "start", "output_dir": "runs", "max_steps": max_steps, "actors.count": 1, "checkpoint.save_every": 100_000}
        config = load(QUICK, {**SMALL, **run, **{f"launch.{key}": value for key, value in launch.items()}})
        (self._script.parent / "config.toml").write_text(dump(config))

    def submit(self, *options: str) -> str:
        return self._slurm.submit(self._script, "--nodes=2", *options)

    def goes_on(self) -> int:
        """Two steps more; how many there are then."""
        before = steps(self.run.path) if self.run.metrics.exists() else 0
        return wait_for(lambda: self.run.metrics.exists() and max(steps(self.run.path) - before - 1, 0) and steps(self.run.path), "two steps")

    def reaches(self, number: str, **fields: str) -> dict[str, str]:
        """Wait until Slurm says this of the job; all that it says then."""
        return wait_for(lambda: (said := self._slurm.job(number)).items() >= fields.items() and said, f"{number}: {fields}")

    def said(self, number: str) -> str:
        return (self._script.parent / f"slurm-{number}.out").read_text()


@pytest.fixture
def job(slurm: Slurm, folder: Path, request: pytest.FixtureRequest) -> Job:
    made = Job(slurm, folder / request.node.name[:20], folder / "own")
    made.configure(100_000)
    return made


def saved(run: RunDir) -> int:
    return int(json.loads((run.latest / "state.json").read_text())["step"])


def test_a_job_saves_its_run_before_its_time_limit_and_goes_on_with_the_nodes_that_are_left(slurm: Slurm, job: Job) -> None:
    number = job.submit()
    job.goes_on()
    assert job.reaches(number, JobState="RUNNING")["NodeList"] == "a,b"
    slurm.update("NodeName=b", "State=DRAIN", "Reason=tested")
    job.goes_on()

    slurm.update(f"JobId={number}", "TimeLimit=10")  # no longer than before it the script asks for the signal
    job.reaches(number, JobState="PENDING", Restarts="1")
    reached = steps(job.run.path)
    assert saved(job.run) == reached and "drained; --resume continues" in job.said(number)

    job.configure(reached + 4)
    slurm.update(f"JobId={number}", "TimeLimit=60", "StartTime=now")  # Slurm lets what is requeued wait for two minutes
    assert job.reaches(number, JobState="COMPLETED")["NodeList"] == "a,c"
    assert_whole(job.run.path, reached + 4)
    slurm.update("NodeName=b", "State=RESUME")


def test_jobs_in_a_row_go_on_with_one_run_and_the_next_does_when_one_is_cancelled(slurm: Slurm, job: Job) -> None:
    first = job.submit("--no-requeue")
    following = job.submit("--no-requeue", "--array=1-3%1", f"--dependency=afterany:{first}")
    job.goes_on()
    slurm.control("scancel", "--batch", "--signal=TERM", first)
    job.reaches(first, JobState="COMPLETED", ExitCode="0:0", Restarts="0")
    assert "drained; --resume continues" in job.said(first)

    job.reaches(f"{following}_1", JobState="RUNNING")
    last = job.goes_on() + 8
    job.configure(last)
    slurm.control("scancel", f"{following}_1")
    job.reaches(f"{following}_1", JobState="CANCELLED", Restarts="0")
    assert "drained; --resume continues" in job.said(f"{following}_1")

    for task in ("2", "3"):
        job.reaches(f"{following}_{task}", JobState="COMPLETED", ExitCode="0:0")
        assert f"all steps done: {last} steps" in job.said(f"{following}_{task}")
    assert_whole(job.run.path, last)
