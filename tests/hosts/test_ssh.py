"""Runs over ssh, by the command that docs/machines.md shows: hosts that it does not reach, and connections that it loses."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.hosts.connections import connect
from tests.conftest import REPOSITORY, has_ended, wait_for
from tests.hosts.cluster import more_groups, steps_on, training
from tests.hosts.sshd import Ssh, ssh_obstacle

OBSTACLE = ssh_obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
SHOWN = (REPOSITORY / "docs" / "machines.md").read_text().partition("\n    [launch]\n")[2].partition("\n\n")[0]
LAUNCH = tomllib.loads(textwrap.dedent(SHOWN))


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Ssh]:
    with Ssh.to(("login", *LAUNCH["hosts"]), tmp_path) as made:
        yield made


def settings(folder: Path) -> dict[str, Any]:
    return {**{f"launch.{key}": value for key, value in LAUNCH.items()}, "launch.directory": str(folder / "own" / "there")}


def forget(ssh: Ssh) -> None:
    ssh.known_hosts.write_text("")


def change_key(ssh: Ssh) -> None:
    names = [line.partition(" ") for line in ssh.known_hosts.read_text().splitlines()]
    ssh.known_hosts.write_text("".join(f"{name[0]} {other[2]}\n" for name, other in zip(names, reversed(names), strict=True)))


def refuse(ssh: Ssh) -> None:
    ssh.authorized.write_text("")


def greet(ssh: Ssh) -> None:
    (ssh.of["gpu1"].home / ".bashrc").write_text("echo Welcome to gpu1\n")


def install_nothing(ssh: Ssh) -> None:
    ssh.of["gpu1"].host.run("rm /opt/venv")


def end_sshd(ssh: Ssh) -> None:
    ssh.of["gpu1"].kill()


def freeze_sshd(ssh: Ssh) -> None:
    for process in ssh.of["gpu1"].processes():
        process.suspend()


@pytest.mark.parametrize(
    ("obstruct", "message"),
    [
        (forget, "code 255: Host key verification failed."),
        (change_key, "code 255: Host key verification failed."),
        (refuse, r"code 255: root@gpu1: Permission denied \(publickey\)"),
        (greet, "may pass on nothing but the agent's output.* It is b'Welcome to gpu1"),
        (install_nothing, "code 127: bash: line 1: /opt/venv/bin/python: No such file or directory"),
        (end_sshd, "code 255: ssh: connect to host gpu1 port 22: Connection refused"),
        (freeze_sshd, "code 255: Connection to 10.77.0.2 port 22 timed out"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named_with_the_reason_before_the_run_begins(
    ssh: Ssh, small: Any, tmp_path: Path, obstruct: Callable[[Ssh], None], message: str
) -> None:
    obstruct(ssh)
    command = {"launch.command": ssh.hosts["login"].command(LAUNCH["command"]), "launch.interface": "lo"}
    with pytest.raises(ConfigError, match=f"the run cannot be started: host 'gpu1': its command .*{message}"):
        connect(small(**settings(tmp_path) | command))


def test_a_run_over_ssh_uses_a_host_again_whose_sshd_dies_and_one_whose_connection_hangs(
    ssh: Ssh, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    output = tmp_path / "output"

    def says(text: str) -> Callable[[], bool]:
        return lambda: text in output.read_text()

    overrides = settings(tmp_path) | {
        "launch.lost_after_s": 6.0, "actors.count": 2, "engine.slots": 8, "max_steps": 100_000,
        "placement.hosts": [{}, {"name": "gpu1"}, {"name": "gpu2"}],
    }  # fmt: skip
    with training(ssh.hosts["login"], small_arguments(**overrides), output) as (_, run):
        more_groups(run, ["actor-0", "actor-1"], "groups on both hosts")

        ssh.of["gpu1"].kill()
        wait_for(says("actor-0 is lost: host 'gpu1': its command (ssh) ended with code 255: "), "the loss of its sshd")
        wait_for(lambda: not ssh.of["gpu1"].agents(), "the end of its agent")
        wait_for(says("ssh: connect to host gpu1 port 22: Connection refused; it is tried again"), "another try")
        steps_on(run, 2, "steps without it")
        ssh.of["gpu1"].start()
        more_groups(run, ["actor-0"], "new groups there")

        (agent,) = ssh.of["gpu2"].agents()
        for process in ssh.of["gpu2"].sessions():
            process.suspend()
        wait_for(says("actor-1 is lost: host 'gpu2': it has sent nothing for 6 s (launch.lost_after_s)"), "its silence")
        wait_for(lambda: has_ended(agent), "the end of an agent that nothing reaches")
        more_groups(run, ["actor-1"], "groups through another connection")
