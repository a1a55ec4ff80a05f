"""Agents on the nodes of a Ray cluster: Ray starts one on each node that the run uses, and reports when it is gone.

    owns        its process's connection to the cluster (begun by `cluster`); for each channel a Ray actor and its agent
    waits for   Ray to start an actor, `START_S`; events, in a call of a second at most
    woken by    the answers of those calls, and orders
    on close    the agents end, and the actors are killed; those end anyway with the process that started them

Ray carries orders and events as bytes, and nothing else: groups and weights go over ZeroMQ with keys, and no function or object
of a user is pickled. A host of the run is called `ray-0`, `ray-1`, ... and is a place that a node takes: when the node is lost,
one that is free or joins takes its place. A node has the GPUs that Ray lists for it. There is no placement group: an agent is
pinned to its node and takes there all that the run needs of it, which is what a group of one bundle a node would reserve, and
a node that joins later would need a group of its own. Needs the extra `ray`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.connection import START_S
from async_rlhf.launch.hosts import CommandChannel, Pipe
from async_rlhf.launch.sockets import socket_root

_OLDEST = (2, 60)
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
_PROBE_S = 5.0
_EVENTS_S = 1.0


class RayAgent:
    """A Ray actor that passes bytes to and from an agent, which it starts and which ends with it. Two threads call it.

    A worker of Ray outlives its node's daemon for long: the agent ends by itself when it has received nothing for a while.
    """

    command = tuple(python("-m", "async_rlhf.launch.agent"))

    def __init__(self) -> None:
        node, gpus = ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
        self._channel = CommandChannel([*self.command, node, str(len(gpus))])

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    def receive(self) -> list[bytes]:
        """The next frames; waits a second for one."""
        frames, wait_s = list[bytes](), _EVENTS_S
        while (frame := self._channel.receive(wait_s)) is not None:
            frames.append(frame)
            wait_s = 0.0
        return frames

    def close(self) -> None:
        self._channel.close()


class RayHosts:
    """The nodes of a cluster, which this process joins, for the places of a run. Raises ConfigError when there is no such
    cluster, or no node of it can be used.

    address: IP:PORT of its head, or `auto` (`join`). most: no more nodes are used (None: all that are there).
    on_gpus: every agent takes its node's GPUs, and no other work is given them. names: the places of a run that has begun,
    which nodes take when they are there.
    """

    def __init__(self, address: str, most: int | None, *, on_gpus: bool, names: Sequence[str] = ()) -> None:
        self._on_gpus, self._guard = on_gpus, threading.Lock()
        self.is_begun = join(address, "launch.address", or_local=not names)
        """A cluster of this machine alone was begun, for there was none."""
        self.address = ray.get_runtime_context().gcs_address
        self.here = str(ray.get_runtime_context().get_node_id())
        there = self._nodes()
        if not there and not names:
            ray.shutdown()
            needed = "a CPU and a GPU" if on_gpus else "a CPU"
            raise ConfigError(f"launch.address = {address!r}: no node of the cluster has {needed} for an agent")
        # A place and the node that has it, if any.
        taken = {f"ray-{number}": str(node["NodeID"]) for number, node in enumerate(there[:most])}
        self._taken = dict.fromkeys(names, "") if names else taken
        self.names = tuple(self._taken)
        self.addresses = tuple(sorted({node["NodeManagerAddress"] for node in there}))

    def connect(self, name: str) -> Any:
        """A `RayAgent` that runs on the node of this place. Raises OSError, RayError."""
        node = self._take_node(name)
        gpus = node["Resources"].get("GPU", 0) if self._on_gpus else 0
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_concurrency": 3, "max_restarts": 0}
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        agent = ray.remote(RayAgent).options(scheduling_strategy=strategy, **options).remote()
        if not ray.wait([agent.__ray_ready__.remote()], timeout=START_S)[0]:
            ray.kill(agent)
            raise TimeoutError(f"Ray has started no agent within {START_S:.0f} s")
        return agent

    def _take_node(self, name: str) -> dict[str, Any]:
        """The node that has this place; where it is gone, one that has none takes it. Raises OSError."""
        with self._guard:
            there = {node["NodeID"]: node for node in self._nodes()}
            if self._taken[name] not in there:
                self._taken[name] = ""
                free = [each for each in there if each not in self._taken.values()]
                if not free:
                    raise ConnectionRefusedError("no node of the cluster is free for it; one that joins will be taken")
                self._taken[name] = free[0]
            return there[self._taken[name]]

    def _nodes(self) -> list[dict[str, Any]]:
        """The living nodes that can hold an agent; the node of this process last, because hub and learner run there."""
        alive, needed = [node for node in ray.nodes() if node["Alive"]], ("CPU", "GPU") if self._on_gpus else ("CPU",)
        if self.here not in [node["NodeID"] for node in alive]:
            sys.stderr.write("this machine is no longer a node of the cluster that was joined\n")
            os._exit(1)  # `cluster` begins a process that joins what is there now
        found = [node for node in alive if all(node["Resources"].get(each, 0) >= 1 for each in needed)]
        return sorted(found, key=lambda node: (node["NodeID"] == self.here, node["NodeID"]))


def main() -> int:
    """Join the cluster, say so on standard output, and carry frames between a supervisor and agents, until standard input ends.
    The argument: see `cluster`."""
    asked = json.loads(sys.argv[1])
    supervisor = Pipe(os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints
    path, listener, carriers = asked.pop("path"), socket.socket(socket.AF_UNIX), list[threading.Thread]()
    try:
        hosts = RayHosts(**asked)
    except ConfigError as error:
        supervisor.send(json.dumps({"error": str(error)}).encode())
        return 0
    listener.bind(path)
    listener.listen()
    facts = {each: getattr(hosts, each) for each in ("names", "addresses", "here", "address", "is_begun")}
    supervisor.send(json.dumps(facts).encode())
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        carrier = threading.Thread(target=_carry, args=(listener.accept()[0], hosts), daemon=True)
        carrier.start()
        carriers = [*filter(threading.Thread.is_alive, carriers), carrier]  # a lost host is tried again for weeks
    for carrier in carriers:  # each ends its agent, for the supervisor has closed its channel
        carrier.join(_PROBE_S)
    ray.shutdown()
    return 0


def _carry(connection: socket.socket, hosts: RayHosts) -> None:
    """One channel of `cluster`, until one of its ends is gone."""
    pipe, agent, pending = Pipe(os.dup(connection.fileno()), os.dup(connection.fileno())), None, None
    try:
        agent = hosts.connect((pipe.receive(_PROBE_S) or b"").decode())
        pipe.send(b"+")
        orders = threading.Thread(target=_carry_orders, args=(pipe, agent), daemon=True)
        orders.start()
        while orders.is_alive():
            pending = pending or agent.receive.remote()
            with suppress(GetTimeoutError):
                events, pending = ray.get(pending, timeout=_EVENTS_S), None
                for event in events:
                    pipe.send(b"+" + event)
    except (OSError, RayError) as error:
        _tell_end(pipe, error)
    finally:
        if agent is not None:
            with suppress(RayError):  # it is gone, or hangs
                ray.get(agent.close.remote(), timeout=_PROBE_S)
            ray.kill(agent)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _carry_orders(pipe: Pipe, agent: Any) -> None:
    try:
        while True:
            if (frame := pipe.receive(_EVENTS_S)) is not None:
                ray.get(agent.send.remote(frame), timeout=START_S)
    except (OSError, RayError) as error:
        _tell_end(pipe, error)


def _tell_end(pipe: Pipe, error: Exception) -> None:
    with suppress(OSError):  # it may be the supervisor that is gone
        pipe.send(b"-" + first_line(error).encode())


def join(address: str, setting: str, *, or_local: bool = False) -> bool:
    """Connect this process to the cluster, until `ray.shutdown`. setting: what the address was given as. or_local: where `auto`
    finds none, and RAY_ADDRESS names none, one of this machine alone is begun, as by `ray.init()`. Returns whether it was.
    Raises ConfigError."""
    installed = tuple(int(part) for part in version("ray").split(".")[:2])
    if installed < _OLDEST:
        raise ConfigError(
            f"{setting} = {address!r}: ray {version('ray')} is installed, the oldest is {'.'.join(map(str, _OLDEST))}"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"{setting} = {address!r} is a Ray Client address: run the command on a node of the cluster (as ray job submit "
            f"does), with {setting} = 'auto' or IP:PORT of the head"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{setting} = {address!r}: no Ray cluster answers there ({error}); give IP:PORT") from error
    try:
        try:
            ray.init(address=address, **_QUIET)
            return False
        except ConnectionError:
            if not or_local or address != "auto" or os.environ.get("RAY_ADDRESS"):
                raise
            temporary = os.environ.get("RAY_TMPDIR") or str(socket_root(room=70) / "ray")  # for its own sockets
            ray.init(address="local", include_dashboard=False, _temp_dir=temporary, **_QUIET)
            return True
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"{setting} = {address!r}: the Ray cluster cannot be joined: {first_line(error)}; `ray start --head` begins one, "
            "and one with a token is joined with RAY_AUTH_MODE=token in the environment"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error, or of the cause of an error of Ray's."""
    error = getattr(error, "cause", None) or error
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
