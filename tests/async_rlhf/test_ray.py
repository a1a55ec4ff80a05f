"""A run whose actors are on the nodes of a Ray cluster: real raylets on this machine."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.chaos import FaultInjector, problems
from async_rlhf.launch.connection import Connections, NodeFiles
from async_rlhf.launch.local import LocalLauncher
from async_rlhf.launch.orders import OpenAgent
from async_rlhf.launch.program import Process, actor_node, role_of
from async_rlhf.launch.ray import RayAgent, RayHosts, join
from async_rlhf.preparation import prepare
from async_rlhf.run.hosts.connections import connect, found_by
from async_rlhf.run.hosts.placement import inventory_of, placement_of, table
from async_rlhf.run.loading import load
from tests.async_rlhf.test_supervisor import Heard
from tests.conftest import QUICK, SMALL, has_ended, output_of, sets, wait_for
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


def roles(folder: Path) -> list[psutil.Process]:
    """The roles that agents have started below this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if role_of(line) and f" {folder}" in line[0] and not has_ended(process):
            found.append(process)
    return found


@pytest.mark.rest
def test_the_quick_run_learns_while_a_node_is_lost_and_one_joins(
    launch: dict[str, Any], cluster: Cluster, tmp_path: Path
) -> None:
    """Meanwhile chaos ends an actor and an agent on the nodes. It ends after that, and 200 steps."""
    lost, back = list[str](), list[str]()

    def step() -> None:
        actors = {name: supervisor._children[name] for name in ("actor-0", "actor-1")}
        if not lost and all(child._progressed for child in actors.values()):
            own = ray.get_runtime_context().get_node_id()  # of the supervisor: it would end with its node
            cluster.remove_node(next(node for node in cluster.worker_nodes if node._node_id != own), allow_graceful=False)
            lost.append("a node")
        elif lost and not back and (events := [text for text in heard.events if "is lost" in text]):
            if any("no node of the cluster is free" in text for text in events) and len(cluster.worker_nodes) == 1:
                cluster.add_node(**_NODE)
            name = events[0].split()[0]
            if len(cluster.worker_nodes) == 2 and actors[name].process is not None and actors[name]._progressed:
                back.append(name)
                stack.enter_context(injector)
        elif back and len(injector.faults) == 2 and supervisor.num_records >= max(200, injector.faults[1].step + 20):
            supervisor.drain()

    heard = Heard(step)
    own = {"max_steps": 5000, "data.held_out": 0, "launch.lost_after_s": 8.0}
    config = load(QUICK, {**launch, **own})
    supervisor, run = prepare(config, progress=heard)

    def away() -> dict[str, Process]:
        return {name: process for name, process in supervisor.processes().items() if name.startswith("actor-")}

    injector = FaultInjector(away, lambda: supervisor.num_records, 2, 4, agents=supervisor.agents)
    with ExitStack() as stack:
        assert not supervisor.run(), heard.events
    assert problems(run, config.model_copy(update={"max_steps": supervisor.num_records})) == []
    assert np.mean([record["reward"] for record in run.read_metrics()[-20:]]) >= 0.9
    assert not ray.is_initialized()
    wait_for(lambda: not roles(tmp_path / "there"), "every role to end")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["contents"]
    written = run.config()
    assert written.security.keys == str(run.path / "keys") and not written.address.startswith("tcp://127.")


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

    program = (
        f"import os, sys; from async_rlhf.launch import agent; sys.executable = {str(python)!r}; "
        "os.environ['ASYNC_RLHF_FORK_SERVER'] = 'off'; sys.exit(agent.main())"
    )

    class Pretending(RayAgent):
        command = (sys.executable, "-c", program)

    monkeypatch.setattr("async_rlhf.launch.ray.RayAgent", Pretending)
    third = cluster.add_node(**_NODE)
    overrides = {"engine.device": "cuda", "actors.count": "fill"}
    config = on_ray(**overrides)
    connections = Connections(
        RayHosts(cluster.address, None, on_gpus=True),
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


def test_where_no_cluster_is_and_no_address_was_given_a_local_ray_is_started_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[str]()

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        if address != "local":
            raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    join("auto", "launch.address", or_local=True)
    assert asked == ["auto", "local"] and "one of this machine alone is started" in caplog.text
    with pytest.raises(ConfigError, match=r"--ray = 'auto': the Ray cluster cannot be joined: Could not find.*AUTH_MODE=token"):
        join("auto", "--ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="cannot be joined"):
        join("auto", "launch.address", or_local=True)
    assert asked.count("local") == 1
