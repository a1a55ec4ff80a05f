"""Runs on two hosts. B has a relay and a clock five minutes ahead: its cable is pulled for a moment and for long, its relay
dies, its disk is full, it dies. And B has a learner rank, and dies and comes back.

They are on one machine (`tests/hosts/machines.py`). B has a disk of a few MiB.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.transport import keys, link
from async_rlhf.launch.program import role_of
from async_rlhf.run.run_dir import RunDir
from tests.async_rlhf.test_hosts import AHEAD_S, clock_ahead, times_relayed
from tests.conftest import wait_for
from tests.hosts.cluster import command_for, more_groups, of_actors, roles_of_agent, steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Hosts, obstacle
from tests.hosts.switch import DEVICE

OBSTACLE = obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
PORT = 5555  # of a network that nobody else is in
SHORT_S = 3.0
FAR = ("actor-1", "actor-2")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with closing(Hosts(tmp_path, ("a", "b"), "8m")) as made:
        yield made


def is_heard(run: RunDir) -> bool:
    return max(of_actors(run, FAR, "silent_s"), default=60) < SHORT_S


def on_b(training: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """The agent and its roles."""
    (agent,) = (each for each in psutil.Process(training.pid).children() if "async_rlhf.launch.agent" in each.cmdline())
    return {"agent": agent, **roles_of_agent(agent)}


def test_a_host_that_is_cut_off_comes_back_and_nothing_is_lost(
    hosts: Hosts, small_arguments: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys.create(tmp_path / "keys", [], link.new_pair)
    clock = f"PYTHONPATH={clock_ahead(tmp_path_factory.mktemp('clock'), AHEAD_S)}"
    overrides = {
        "address": f"tcp://{hosts['a'].address}:{PORT}", "security.keys": str(tmp_path / "keys"),
        "launch.kind": "hosts", "launch.hosts": ["b"], "launch.command": command_for([hosts["b"]], clock),
        "launch.directory": str(tmp_path / "there"), "actors.count": 3,
        "placement.hosts": [{"cpus": 3}, {"name": "b", "cpus": 2}], "max_steps": 100_000,
        "queue.lease_s": 6 * SHORT_S, "checkpoint.save_every": 1000,
    }  # fmt: skip
    with training(hosts["a"], small_arguments(**overrides), tmp_path / "output") as (process, run):
        more_groups(run, FAR, "groups on the other host")
        assert times_relayed(run) == 1
        before = on_b(process)
        assert {"agent", "actor-1", "actor-2", "relay-1"} <= before.keys()

        hosts.network.set(hosts.between(), Conditions(cut=True))
        wait_for(lambda: min(of_actors(run, FAR, "silent_s"), default=SHORT_S + 1) > SHORT_S, "a short silence")
        hosts.network.set(hosts.between(), Conditions())
        wait_for(lambda: is_heard(run), "the other host's voice")

        hosts.network.set(hosts.between(), Conditions(cut=True))
        wait_for(lambda: not any(of_actors(run, FAR, "groups")), "the end of their leases")
        steps_on(run, 2, "steps without the other host")
        hosts.network.set(hosts.between(), Conditions())
        more_groups(run, FAR, "new groups on the other host")

        before["relay-1"].kill()
        wait_for(lambda: times_relayed(run) == 2, "both actors behind another relay")
        more_groups(run, FAR, "groups through it")

        hosts["b"].fill_disk(tmp_path)
        steps_on(run, 2, "steps with a full disk")
        wait_for(lambda: is_heard(run), "the other host's voice")
        now = on_b(process)
        assert all(now[name] == before[name] for name in ("agent", "actor-1", "actor-2")), "they are the same processes"
        assert now["relay-1"] != before["relay-1"]

        before["agent"].kill()
        wait_for(lambda: not any(of_actors(run, FAR, "groups")), "its groups for others")


def test_a_learner_whose_second_host_dies_names_it_and_goes_on_from_its_checkpoint_when_it_is_back(
    hosts: Hosts, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    down, output = tmp_path / "down", tmp_path / "output"
    script = f'test -e {down} && echo "no route to B" >&2 && exit 1; exec "$@"'
    agent = hosts["b"].command_from_another([sys.executable, "-m", "async_rlhf.launch.agent"])
    b = hosts["b"].address
    overrides = {
        "launch.kind": "hosts", "launch.hosts": [b], "launch.interface": DEVICE, "launch.directory": str(tmp_path / "there"),
        "launch.command": ["sh", "-c", script, "sh", *agent],
        "placement.hosts": [{"cpus": 4}, {"name": b}], "placement.learner_hosts": ["", b], "learner.ranks": 2,
        "actors.count": 1, "max_steps": 100_000,
    }  # fmt: skip
    with training(hosts["a"], small_arguments(**overrides), output) as (process, run):
        wait_for(lambda: run.latest.exists() and len(run.read_metrics()) > 2, "a checkpoint and a step after it")
        down.touch()
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # what those that are killed had started ends too
                if "async_rlhf.launch.agent" in each.cmdline() or role_of(each.cmdline()) == "learner_rank":
                    each.kill()
        lost = f"learner is lost: rank 1: host '{b}': its command (sh) ended with code"
        wait_for(lambda: f"{lost} 1: no route to B" in output.read_text(), "another start on the host that is down")
        assert f"{lost} -9: no output" in output.read_text()
        down.unlink()
        steps_on(run, 3, "steps with both hosts")
    assert all(f"over {DEVICE}" in run.log(role).read_text() for role in ("learner", "learner-rank-1"))
    assert "starting it again" not in output.read_text()
