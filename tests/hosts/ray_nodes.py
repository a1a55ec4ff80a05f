"""A Ray cluster over hosts: a head on one of them, nodes on the others, each with an address of its own."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import psutil

from tests.hosts.machines import Host
from tests.raylets import HEALTH, NODE

PORT = 6379
_OWN = ("ray:", "ray.")  # how its names and modules begin


def start_head(host: Host, folder: Path) -> str:
    """Its address. It holds no agents. folder: for Ray's files, on each host; a socket's path bounds its length."""
    options = ("--head", f"--port={PORT}", f"--temp-dir={folder}", "--num-cpus=0", "--include-dashboard=false")
    _start(host, *options, f"--system-config={json.dumps(HEALTH)}")
    return f"{host.address}:{PORT}"


def join_as_node(host: Host, head: str) -> None:
    _start(host, f"--address={head}", f"--num-cpus={NODE['num_cpus']}")


def processes_of_ray(host: Host) -> list[psutil.Process]:
    """The host's part of the cluster, and the head where it is there."""
    return [each for each in host.processes() if any("/ray/" in word or word[:4] in _OWN for word in each.cmdline())]


def _start(host: Host, *options: str) -> None:
    """`ray start`, which ends when the node is known to the head."""
    memory = f"--object-store-memory={NODE['object_store_memory']}"
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", memory, *options]
    host.run(f"RAY_USAGE_STATS_ENABLED=0 {shlex.join(words)}")
