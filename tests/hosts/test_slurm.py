"""Runs in jobs of Slurm, by the script that docs/machines.md shows."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rlhf.run.loading import dump, load
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, REPOSITORY, SMALL, assert_whole, steps, wait_for
from tests.documents import blocks
from tests.hosts.cluster import steps_on
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
    made = Slurm(hosts, folder / "own", folder)
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
        self.max_steps = max_steps
        launch = {**tomllib.loads(SHOWN)["launch"], "hosts": ["replaced"], "directory": str(self._own / "there")}
        run = {
            "name": "start",
            "output_dir": "runs",
            "max_steps": max_steps,
            "actors.count": 1,
            "checkpoint.save_every": 100_000,
        }
        config = load(QUICK, {**SMALL, **run, **{f"launch.{key}": value for key, value in launch.items()}})
        (self._script.parent / "config.toml").write_text(dump(config))

    def submit(self, *options: str) -> str:
        return self._slurm.submit(self._script, "--nodes=2", *options)

    def goes_on(self) -> None:
        """Wait for two steps more."""
        steps_on(self.run, 2, "two steps")

    def reaches(self, number: str, **fields: str) -> dict[str, str]:
        """Wait until Slurm says this of the job; all that it says then."""

        def look() -> dict[str, str]:
            said = self._slurm.job(number)
            assert said.get("JobState") not in ("FAILED", "TIMEOUT"), self.said(number)
            return said if said.items() >= fields.items() else {}

        return wait_for(look, f"job {number}: {fields}")

    def said(self, number: str) -> str:
        return (self._script.parent / f"slurm-{number}.out").read_text()


@pytest.fixture
def job(slurm: Slurm, folder: Path, request: pytest.FixtureRequest) -> Job:
    made = Job(slurm, folder / request.node.name[:20], folder / "own")
    made.configure(100_000)
    return made


def saved(run: RunDir) -> int:
    return int(json.loads((run.latest / "state.json").read_text())["step"])


def test_a_job_saves_its_run_when_its_time_is_up_and_goes_on_with_the_nodes_that_are_left(slurm: Slurm, job: Job) -> None:
    number = job.submit()
    job.goes_on()
    assert job.reaches(number, JobState="RUNNING")["NodeList"] == "a,b"
    slurm.update("NodeName=b", "State=DRAIN", "Reason=tested")
    job.goes_on()

    slurm.update(f"JobId={number}", "TimeLimit=10")  # at which the script wants the signal at once
    job.reaches(number, JobState="PENDING", Restarts="1")
    assert saved(job.run) == steps(job.run.path) and "drained; --resume continues" in job.said(number)

    job.configure(steps(job.run.path) + 4)
    # A job that was requeued waits for two minutes, unless it is told otherwise.
    slurm.update(f"JobId={number}", "TimeLimit=60", "StartTime=now+3")
    assert job.reaches(number, JobState="COMPLETED", ExitCode="0:0")["NodeList"] == "a,c"
    assert_whole(job.run.path, job.max_steps)
    slurm.update("NodeName=b", "State=RESUME")


def test_jobs_in_a_row_go_on_with_one_run_also_when_a_node_fails_and_when_one_is_cancelled(slurm: Slurm, job: Job) -> None:
    row = job.submit("--no-requeue", "--array=1-2%1")
    last = job.submit(f"--dependency=afterany:{row}")
    job.goes_on()
    _, second = job.reaches(f"{row}_1", JobState="RUNNING")["NodeList"].split(",")
    slurm.update(f"NodeName={second}", "State=DOWN", "Reason=tested")
    job.reaches(f"{row}_1", JobState="NODE_FAIL")

    job.goes_on()
    job.configure(steps(job.run.path) + 20)
    slurm.control("scancel", f"{row}_2")
    job.reaches(f"{row}_2", JobState="CANCELLED", Restarts="0")
    assert "drained; --resume continues" in job.said(f"{row}_2")

    job.reaches(last, JobState="COMPLETED", ExitCode="0:0")
    assert_whole(job.run.path, job.max_steps)
