"""Runs on a Ray cluster of three hosts: the command and the cluster's head are on the first, and c is 50 ms away."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from async_rlhf.launch.program import role_of
from tests.conftest import train_arguments, wait_for
from tests.hosts.cluster import more_groups, steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Host, Hosts, obstacle
from tests.hosts.ray_nodes import join_as_node, processes_of_ray, start_head
from tests.hosts.switch import DEVICE

pytest.importorskip("ray")
OBSTACLE = obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
FAR = Conditions(delay_s=0.025)  # each way
ACTOR = ("actor-0",)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="r-") as name:
        yield Path(name)


@pytest.fixture
def hosts(folder: Path) -> Iterator[Hosts]:
    made = Hosts(folder, size="200m")
    made.network.set(made.around(made["c"]), FAR)
    yield made
    made["a"].die()
    made.close()


def begin_cluster(hosts: Hosts, folder: Path) -> str:
    """A head on the first host and nodes on the others; the head's address."""
    head = start_head(hosts["a"], folder / "ray")
    joins = [Thread(target=join_as_node, args=(host, head)) for host in hosts.all[1:]]
    for join in joins:
        join.start()
    for join in joins:
        join.join()
    return head


def roles(host: Host) -> dict[str, psutil.Process]:
    """The roles on a host, by their kind."""
    return {role: each for each in host.processes() if (role := role_of(each.cmdline()))}


def test_an_actor_and_a_rank_on_ray_nodes_outlive_a_node_and_the_head(
    hosts: Hosts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's node is lost and one joins; then the head is lost, with all that is Ray's, and another begins there."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # how long Ray waits for a head, else a minute
    head, output = begin_cluster(hosts, folder), folder / "output"
    settings: dict[str, Any] = {
        "launch.kind": "ray", "launch.address": head, "launch.directory": str(folder / "there"), "launch.interface": DEVICE,
        "launch.lost_after_s": 8.0, "actors.count": 1, "placement.learner_hosts": ["", "ray-1"], "learner.ranks": 2,
        "max_steps": 100_000,
    }  # fmt: skip
    with training(hosts["a"], train_arguments(folder / "runs", **settings), output) as (process, run):
        steps_on(run, 3, "steps of both ranks")
        assert run.config().address.startswith(f"tcp://{hosts['a'].address}:")
        assert f"over {DEVICE}" in run.log("learner-rank-1").read_text()
        of_rank, other = sorted(hosts.all[1:], key=lambda host: "learner_rank" not in roles(host))
        assert "learner_rank" in roles(of_rank) and "actor" in roles(other)

        of_rank.die()
        waits = "no node of the cluster is free for it; one that joins will be taken"
        wait_for(lambda: f"learner is lost: rank 1: host 'ray-1': {waits}" in output.read_text(), "a place without a node")
        assert "actor" in roles(other)
        join_as_node(of_rank, head)
        steps_on(run, 2, "steps with the node that joined")

        for host in hosts.all[1:]:
            host.die()
        for each in processes_of_ray(hosts["a"]):
            each.kill()
        wait_for(lambda: "host 'ray-0': launch.address = " in output.read_text(), "news of the head")
        assert "no Ray cluster answers there" in output.read_text()
        assert "hub" in roles(hosts["a"]) and process.poll() is None, "what is here goes on"
        begin_cluster(hosts, folder)
        more_groups(run, ACTOR, "groups of another cluster's node")
        steps_on(run, 2, "steps with another cluster")
    for host in hosts.all[1:]:
        wait_for(lambda host=host: not roles(host), "every role to end")
        assert host.run(f"ls {folder}/there").split() == ["contents"], "what the agents made is gone"
