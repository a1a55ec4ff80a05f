"""The commands of docs/several-hosts.md, each as it stands there, on four hosts with a real sshd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rlhf.run.run_dir import RunDir
from tests.conftest import wait_for
from tests.documents import Page
from tests.hosts.cluster import assert_nothing_lost, of_actors, steps_on
from tests.hosts.sshd import Ssh, ssh_obstacle

OBSTACLE = ssh_obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
PAGE = Page("several-hosts.md")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Ssh]:
    with Ssh.to(("login", "gpu1", "gpu2", "gpu3"), tmp_path) as made:
        yield made


def test_every_command_of_the_page_on_several_hosts(ssh: Ssh, tmp_path: Path) -> None:
    """Its configuration is appended before it is checked."""
    (launch,) = PAGE.of("toml")
    folder, login, trainings, num_hosts = tmp_path / "own", ssh.hosts["login"], list[subprocess.Popen[bytes]](), iter((1, 3))
    run = RunDir(folder / "runs" / "far")
    own = f"export PATH={Path(sys.executable).parent}:$PATH HOME={ssh.known_hosts.parent.parent}; cd {folder}; exec "
    for line in PAGE.commands():
        if " check " in line:
            with (folder / "config.toml").open("a") as file:
                # Else its files would lie in the home of a user whom all hosts have.
                file.write(launch.replace("[launch]\n", f"[launch]\ndirectory = '{folder}/there'\n"))
        command = login.command(["bash", "-c", own + line.removesuffix(" &")])
        if line.endswith(" &"):
            trainings.append(subprocess.Popen(command))
            names = [f"actor-{number}" for number in range(next(num_hosts))]
            wait_for(lambda names=names: of_actors(run, names, "version"), "the actors of these hosts")  # type: ignore[misc]
            steps_on(run, 2, "steps with them")
            continue
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if " stop " in line:
            assert trainings[-1].wait(timeout=300) == 0
    assert len(trainings) == 2
    assert_nothing_lost(run)
