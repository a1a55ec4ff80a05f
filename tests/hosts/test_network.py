"""Runs over three hosts whose network is damaged in every way; nothing is lost, and what waits has a name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rlhf.buffers.transport import keys, link
from tests.conftest import wait_for
from tests.hosts.chaos import CUT, KINDS, blows, settings, strike
from tests.hosts.cluster import actors, hub_of, more_groups, steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Hosts, obstacle

OBSTACLE = obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
HUB = "hub.example"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with closing(Hosts(tmp_path, size="200m")) as made:
        yield made


def test_a_run_whose_network_is_damaged_in_every_way_loses_nothing(
    hosts: Hosts, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """At last both hosts are cut off, longer than a connection lives: its end is noticed while they are."""
    away = hosts.all[1:]
    arguments = small_arguments(**settings(tmp_path, away), **{"queue.lease_s": 3.0})
    with training(hosts["a"], arguments, tmp_path / "output") as (_, run):
        steps_on(run, 2, "the first steps")
        for blow in blows([host.name for host in hosts.all], len(KINDS), seed=0, longest_s=3.0):
            strike(hosts, blow)
            steps_on(run, 1, f"a step after {blow}")

        ended = wait_for(lambda: hub_of(run).get("connections_ended"), "the hub's counters")
        hosts.network.set(hosts.between(), CUT)
        waiting = wait_for(lambda: hub_of(run).get("waiting_for"), "the name of what the run waits for")
        assert "actor" in waiting, waiting
        wait_for(lambda: hub_of(run).get("connections_ended", 0) >= ended + 2, "the end of both relays' connections")
        hosts.network.set(hosts.between(), Conditions())
        steps_on(run, 2, "steps with both hosts")


def test_an_actor_that_was_started_by_hand_finds_a_hub_whose_name_is_resolved_late_and_then_otherwise(
    hosts: Hosts, small_arguments: Callable[..., list[str]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As docs/security.md has it. The hub's machine gets another address while the run goes on."""
    a, b, _ = hosts.all
    there, moved = tmp_path_factory.mktemp("there"), "10.77.0.101"
    (there / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:10 attempts:3\n")
    (there / "name").write_text(f"{a.address} 2.0")
    b.run(f"mount --bind {there}/resolv.conf /etc/resolv.conf")
    keys.create(tmp_path / "keys", ["far"], link.new_pair)
    own = {"address": "tcp://0.0.0.0:5555", "security.keys": str(tmp_path / "keys"), "actors.count": 1, "max_steps": 100_000}
    with (
        b.running([sys.executable, "-m", "tests.hosts.resolver", str(there / "name")]),
        training(a, small_arguments(**own, **{"queue.lease_s": 3.0}), tmp_path / "output") as (_, run),
    ):
        written = (run.path / "config.toml").read_text()
        (there / "config.toml").write_text(written.replace(str(tmp_path / "keys"), str(there / "keys")))
        shutil.copytree(run.path / "data", there / "data")
        shutil.copytree(tmp_path / "keys" / "for-far", there / "keys")
        role = [sys.executable, "-m", "async_rlhf.run.processes.roles", "actor", str(there), f"tcp://{HUB}:5555", "far-0"]
        with b.running(role) as far:
            more_groups(run, ["far-0"], "groups of the actor that was started by hand")
            device = a.run("ip -o -4 addr show to 10.77.0.0/24").split()[1]
            a.run(f"ip addr del {a.address}/24 dev {device} && ip addr add {moved}/24 dev {device}")
            (there / "name").write_text(f"{moved} 0.0")
            wait_for(lambda: "far-0" not in actors(run) or not actors(run)["far-0"]["groups"], "its silence")
            more_groups(run, ["far-0"], "groups of the actor that knows the new address")
        assert far.returncode is not None
