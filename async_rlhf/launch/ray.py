"""Agents on the nodes of a Ray cluster: Ray starts one on each node that the run uses, and reports when it is gone.

    owns        the connection to the cluster, where this process had none; one Ray actor for each channel, which holds an agent
    waits for   Ray to start an actor, `start_timeout_s`; events, in a call of a second at most
    woken by    the answers of those calls
    on close    the actors are killed; they end anyway with the process that started them

Ray carries orders and events as bytes, and nothing else: groups and weights go over ZeroMQ with keys, and no function or object
of a user is pickled. A host of the run is called `ray-0`, `ray-1`, ... and is a place that a node takes: when the node is lost,
one that is free or joins takes its place. A node has the GPUs that Ray lists for it. There is no placement group: an agent is
pinned to its node and takes there all that the run needs of it, which is what a group of one bundle a node would reserve, and
nodes that join later would need groups of their own. Needs the extra `ray`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.launch.agent import Agent
from async_rlhf.launch.local import warm
from async_rlhf.launch.orders import Alive, Event, Open, encode, order
from async_rlhf.launch.sockets import socket_root

_log = logging.getLogger(__name__)
_TESTED = (2, 60)
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
_PROBE_S = 5.0
_LOOK_S = 0.1
_EVENTS_S = 1.0
_FIRST_ORDER_S = 60.0


class RayAgent:
    """An agent in a Ray actor. Ray calls `take` and `events` from two threads.

    Owns a thread that ends the process, and with it the agent's children, when neither has been called for `lost_after_s`: a
    worker of Ray outlives its node's daemon for long.
    """

    def __init__(self) -> None:
        self._agent = Agent(ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids()))
        warm()
        self._guard = threading.Lock()
        self._events: list[Event] = []
        self._silent_s, self._lost_after_s = 0.0, _FIRST_ORDER_S
        threading.Thread(target=self._end_when_alone, name="end-when-alone", daemon=True).start()

    def take(self, frame: bytes) -> str:
        """Carry out an order; what is wrong with it, and nothing when it was carried out."""
        self._silent_s = 0.0
        try:
            message = order(frame)
            if isinstance(message, Open):
                self._lost_after_s = message.lost_after_s
            with self._guard:
                self._events += self._agent.take(message)
        except (OSError, WireError, ConfigError) as error:
            return str(error) or type(error).__name__
        return ""

    def events(self) -> list[bytes]:
        """What has happened since the last call; waits a second for something."""
        deadline = time.monotonic() + _EVENTS_S
        while True:
            self._silent_s = 0.0
            with self._guard:
                self._events += self._agent.look()
                found, self._events = self._events, []
            if found or time.monotonic() >= deadline:
                return [encode(each) for each in found or [Alive()]]
            time.sleep(_LOOK_S)

    def close(self) -> None:
        with self._guard:
            self._agent.close()

    def _end_when_alone(self) -> None:
        while self._silent_s < self._lost_after_s:
            time.sleep(_LOOK_S)
            self._silent_s += _LOOK_S
        os._exit(1)


class RayHosts:
    """See `connection.Hosts`. Raises ConfigError when there is no such cluster, or no node of it can be used.

    address: IP:PORT of its head, or `auto` (`join`). most: nodes to use, None for those that are there now. actors: of the run;
    no more nodes are used (None: as many as fit). on_gpus: every agent takes its node's GPUs, and no other work is given them.
    """

    def __init__(self, address: str, most: int | None, actors: int | None, start_timeout_s: float, *, on_gpus: bool) -> None:
        self._on_gpus, self._guard = on_gpus, threading.Lock()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            join(address, "launch.address", or_local=True)
        self._own = ray.get_runtime_context().get_node_id()
        there = self._nodes()
        if not there:
            self.close()
            needed = "a CPU and a GPU" if on_gpus else "a CPU"
            raise ConfigError(f"launch.address = {address!r}: no node of the cluster has {needed} for an agent")
        # A place and the node that has it, if any.
        places = min(actors or sys.maxsize, most or len(there))
        self._taken: dict[str, str] = {f"ray-{number}": "" for number in range(places)}
        for name, node in zip(self._taken, there, strict=False):
            self._taken[name] = node["NodeID"]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._taken)

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name, node in self._taken.items() if node)

    @property
    def here(self) -> str:
        return str(self._own)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(sorted({node["NodeManagerAddress"] for node in self._nodes()}))

    def connect(self, name: str, timeout_s: float) -> RayChannel:
        try:
            node = self._take_node(name)
            gpus = node["Resources"].get("GPU", 0) if self._on_gpus else 0
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {
                "num_cpus": 1,
                "num_gpus": gpus,
                "scheduling_strategy": strategy,
                "max_concurrency": 3,
                "max_restarts": 0,
            }
            actor = ray.remote(RayAgent).options(**options).remote()
            try:
                ray.get(actor.events.remote(), timeout=timeout_s)
            except GetTimeoutError as error:
                ray.kill(actor)
                raise TimeoutError(f"Ray has started no agent within {timeout_s:.0f} s (launch.start_timeout_s)") from error
            return RayChannel(actor, timeout_s)
        except RayError as error:
            raise ConnectionAbortedError(first_line(error)) from error

    def close(self) -> None:
        if self._is_ours:
            ray.shutdown()

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
        """Those that live and can hold an agent; that of this process last, for hub and learner run there."""
        needed = ("CPU", "GPU") if self._on_gpus else ("CPU",)
        found = [node for node in ray.nodes() if node["Alive"] and all(node["Resources"].get(each, 0) >= 1 for each in needed)]
        return sorted(found, key=lambda node: (node["NodeID"] == self._own, node["NodeID"]))


class RayChannel:
    """See `connection.Channel`. actor: a `RayAgent` that runs."""

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor, self._timeout_s = actor, timeout_s
        self._events: list[bytes] = []
        self._asked: Any = None

    def send(self, frame: bytes) -> None:
        try:
            problem = ray.get(self._actor.take.remote(frame), timeout=self._timeout_s)
        except RayError as error:
            raise ConnectionAbortedError(first_line(error)) from error
        if problem:
            raise ConnectionAbortedError(problem)

    def receive(self, timeout_s: float) -> bytes | None:
        if not self._events:
            self._asked = self._asked or self._actor.events.remote()
            try:
                self._events = ray.get(self._asked, timeout=timeout_s + _EVENTS_S)
            except GetTimeoutError:
                return None
            except RayError as error:
                raise ConnectionAbortedError(first_line(error)) from error
            self._asked = None
        return self._events.pop(0)

    def close(self) -> None:
        with suppress(RayError):  # it is gone, or hangs
            ray.get(self._actor.close.remote(), timeout=_PROBE_S)
        ray.kill(self._actor)


def join(address: str, setting: str, *, or_local: bool = False) -> None:
    """Connect this process to the cluster, until `ray.shutdown`. setting: what the address was given as. or_local: where `auto`
    finds none, and RAY_ADDRESS names none, one of this machine alone is started, as by `ray.init()`. Raises ConfigError."""
    found = tuple(int(part) for part in version("ray").split(".")[:2])
    if found < _TESTED:
        raise ConfigError(
            f"{setting} = {address!r}: ray {version('ray')} is installed, the oldest is {_TESTED[0]}.{_TESTED[1]}"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"{setting} = {address!r} is a Ray Client's: run the command on a node of the cluster (ray job submit does), "
            f"with {setting} = 'auto' or IP:PORT of the head"
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
        except ConnectionError:
            if not or_local or address != "auto" or os.environ.get("RAY_ADDRESS"):
                raise
            _log.warning("there is no Ray cluster here: one of this machine alone is started, and ends with this command")
            temporary = os.environ.get("RAY_TMPDIR") or str(socket_root(room=70) / "ray")  # for its own sockets
            ray.init(address="local", include_dashboard=False, _temp_dir=temporary, **_QUIET)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"{setting} = {address!r}: the Ray cluster cannot be joined: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
