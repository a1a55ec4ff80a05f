"""A run whose actors are on the nodes of a Ray cluster: real raylets on this machine."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.cluster import RayCluster
from async_rlhf.launch.connection import Connections, NodeFiles
from async_rlhf.launch.local import LocalLauncher
from async_rlhf.launch.orders import OpenAgent
from async_rlhf.launch.program import actor_node
from async_rlhf.launch.ray import join
from async_rlhf.run.hosts.connections import connect, found_by
from async_rlhf.run.hosts.placement import inventory_of, placement_of, table
from tests.conftest import QUICK, SMALL, output_of, sets, wait_for
from tests.raylets import NODE, two_nodes

_NODE = {**NODE, "num_gpus": 8}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that holds no agents, and two nodes that pretend to have eight GPUs."""
    with two_nodes(num_gpus=8) as found:
        yield found


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run on it, with two actors, each on a node of its own."""
    there = {"launch.kind": "ray", "launch.address": cluster.address, "launch.directory": str(tmp_path / "there")}
    return {**there, "actors.count": 2, "output_dir": str(tmp_path / "runs")}


@pytest.fixture
def on_ray(small: Any, launch: dict[str, Any]) -> Any:
    """`on_ray(**overrides)`: the small run there."""
    return lambda **overrides: small(**{**launch, **overrides})


@pytest.mark.rest
def test_at_bound_zero_ray_and_this_machine_make_the_same_weights(on_ray: Any) -> None:
    settings = {"queue.max_staleness": 0, "max_steps": 20, "checkpoint.save_every": 20, "learner.learning_rate": 1e-3}
    here, there = (train(on_ray(**settings, name=k, **{"launch.kind": k}), quiet=True).run_dir for k in ("local", "ray"))
    for name in ("model/model.safetensors", "optimizer-00001.safetensors"):
        assert (here / "checkpoints/step_000020" / name).read_bytes() == (there / "checkpoints/step_000020" / name).read_bytes()


def test_actors_on_three_nodes_have_devices_of_their_own_and_check_shows_the_same(
    on_ray: Any, launch: dict[str, Any], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight pretended GPUs a node; the processes only write down what they see."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "sees ${CUDA_VISIBLE_DEVICES-all}"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)

    agent = (
        f"import os, sys; from async_rlhf.launch import agent; sys.executable = {str(python)!r}; "
        "os.environ['ASYNC_RLHF_FORK_SERVER'] = 'off'; sys.exit(agent.main())"
    )
    program = f"""
from async_rlhf.launch import ray
class Pretending(ray.RayAgent):
    command = {(sys.executable, "-c", agent)!r}
ray.RayAgent = Pretending
"""
    monkeypatch.setattr(RayCluster, "program", program + RayCluster.program)
    third = cluster.add_node(**_NODE)
    overrides = {"engine.device": "cuda", "actors.count": "fill"}
    config = on_ray(**overrides)
    connections = Connections(
        RayCluster(cluster.address, None, on_gpus=True),
        OpenAgent(directory=config.launch.directory, lost_after_s=30.0, accelerators=True),
        lambda node, directory: NodeFiles({}, {}, {f"{node.name}.log": node.log}),
    )
    connections.local = LocalLauncher()
    connections.check()
    hosts, remarks = found_by(connections)
    assert [(host.name, host.devices) for host in hosts] == [(f"ray-{number}", 8) for number in range(3)]
    inventory = inventory_of(config, hosts)
    placement = placement_of(config, inventory)

    assert placement.num_actors == 24
    for number in (0, 1, 2, 23):  # in turn on the three
        node = placement.placed(actor_node("", number, tmp_path / f"{number}.log"))
        process = connections.start(tmp_path, node)
        wait_for(lambda process=process: process.poll() is not None, f"the end of {node.name}")
        assert (node.host, process.failure_message()) == (f"ray-{number % 3}", f"host {node.host!r}: sees {number // 3}")
    connections.close()
    checked = output_of(0, "check", QUICK, *sets({**SMALL, **launch, **overrides})).splitlines()
    assert all(line in checked for line in (*remarks, *table(config, inventory, placement)))
    cluster.remove_node(third)


def test_a_cluster_that_cannot_be_used_is_refused(on_ray: Any, cluster: Cluster) -> None:
    for address, message in (
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("nowhere", "no Ray cluster answers there"),
        ("ray://127.0.0.1:10001", "is a Ray Client address"),
    ):
        with pytest.raises(ConfigError, match=message):
            connect(on_ray(**{"launch.address": address}))


def test_a_ray_older_than_the_tested_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rlhf.launch.ray.version", lambda name: "2.9.3")
    with pytest.raises(ConfigError, match=r"--ray = 'auto': ray 2\.9\.3 is installed, the oldest is 2\.60"):
        join("auto", "--ray")


def test_where_no_cluster_is_and_no_address_was_given_a_local_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        if address != "local":
            raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert join("auto", "launch.address", or_local=True) and asked == ["auto", "local"]
    with pytest.raises(ConfigError, match=r"--ray = 'auto': the Ray cluster cannot be joined: Could not find.*AUTH_MODE=token"):
        join("auto", "--ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="cannot be joined"):
        join("auto", "launch.address", or_local=True)
    assert asked.count("local") == 1
