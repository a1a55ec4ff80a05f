"""The commands of docs/several-hosts.md, each as it stands there, on four hosts with a real sshd."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY, wait_for
from tests.hosts.cluster import assert_nothing_lost, of_actors, steps_on
from tests.hosts.machines import Hosts
from tests.hosts.sshd import Ssh, ssh_obstacle

OBSTACLE = ssh_obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
BLOCKS = re.findall(r"```(bash|toml)\n(.*?)```", (REPOSITORY / "docs" / "several-hosts.md").read_text(), re.DOTALL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "own").mkdir()
    made = Hosts(tmp_path / "own", ("login", "gpu1", "gpu2", "gpu3"))
    yield made
    made.close()


@pytest.fixture
def ssh(hosts: Hosts, tmp_path: Path) -> Iterator[Ssh]:
    made = Ssh(hosts, tmp_path)
    yield made
    made.close()


def test_every_command_of_the_page_on_several_hosts(hosts: Hosts, ssh: Ssh, tmp_path: Path) -> None:
    assert {"bash", "toml"} == {kind for kind, _ in BLOCKS}
    folder, login = tmp_path / "own", hosts["login"]
    run, training, hosts_used = RunDir(folder / "runs" / "far"), list[subprocess.Popen[bytes]](), 0
    own = f"export PATH={Path(sys.executable).parent}:$PATH HOME={ssh.known_hosts.parent.parent}; cd {folder}; exec "
    for kind, block in BLOCKS:
        if kind == "toml":
            with (folder / "config.toml").open("a") as file:
                # Else its files would lie in the home of a user whom all hosts have.
                file.write(block.replace("[launch]\n", f"[launch]\ndirectory = '{folder}/there'\n"))
            continue
        for line in block.splitlines():
            if line.endswith(" &"):
                hosts_used += 1 if not training else 2
                training.append(subprocess.Popen(login.command(["bash", "-c", own + line.removesuffix(" &")])))
                names = [f"actor-{number}" for number in range(hosts_used)]
                wait_for(lambda names=names: of_actors(run, names, "version"), "the actors of these hosts")  # type: ignore[misc]
                steps_on(run, 2, "steps with them")
                continue
            done = subprocess.run(login.command(["bash", "-c", own + line]), capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            if " stop " in line:
                assert training[-1].wait(timeout=300) == 0
    assert len(training) == 2
    assert_nothing_lost(run)
