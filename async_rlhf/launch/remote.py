"""Starts nodes on other hosts: one agent a host, reached over a connection that is made when it is needed.

    owns        the connections, and what they are made from (`Hosts`)
    waits for   nothing in `start`; `check` for all agents to answer
    woken by    the supervisor
    on close    every connection is closed, which ends the agents and all they run

A host that is lost ends its processes (`connection`); the next start on it connects again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.connection import Connection, Hosts, Pack, Place, RemoteProcess, nothing
from async_rlhf.launch.depot import known_digest
from async_rlhf.launch.orders import Open
from async_rlhf.launch.placement import Inventory
from async_rlhf.launch.program import Launcher, Node, Process


class Connections:
    """To the hosts of a run. opening: the first order to each agent. places: what hosts may have already. pack: what a node
    is given."""

    def __init__(self, hosts: Hosts, opening: Open, places: Sequence[Place] = (), pack: Pack = nothing) -> None:
        self._hosts, self._places, self.present = hosts, places, hosts.present
        self._new = partial(Connection, hosts=hosts, opening=opening, places=places, pack=pack)
        self._connections: dict[str, Connection] = {}

    @property
    def awaited(self) -> tuple[str, ...]:
        """Hosts that are not there yet."""
        return tuple(name for name in self._hosts.names if name not in self._connections)

    def inventory(self) -> Inventory:
        """What the hosts have, after `check`; one that is not there yet is taken to be like the first that is."""
        found = {name: connection.host for name, connection in self._connections.items()}
        like = next(iter(found.values()))
        return tuple(found.get(name) or replace(like, name=name, own=False) for name in self._hosts.names)

    def check(self) -> None:
        """Connect to every host at once. Raises ConfigError naming the first that cannot be used."""
        for place in self._places:
            for name in place.names:  # now: while gigabytes are read no host is sent anything
                known_digest(place.here / name)
        for connection in [self.to(name) for name in self.present]:
            connection.ready.wait()  # each step of it has a deadline
            if connection.lost:
                raise ConfigError(f"the run cannot be started: {connection.lost}")

    def to(self, name: str) -> Connection:
        """The connection to a host; another when the last one is lost."""
        found = self._connections.get(name)
        if found is None or found.lost:
            found = self._connections[name] = self._new(name)
        return found

    def agents(self) -> dict[str, Callable[[], None]]:
        """See `program.Launcher`."""
        there = {name: each for name, each in self._connections.items() if each.ready.is_set() and not each.lost}
        return {name: partial(each.close, "its agent was ended") for name, each in there.items()}

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._hosts.close()


class RemoteLauncher:
    """See `program.Launcher`: nodes with a host through its agent, the others by `local`."""

    def __init__(self, local: Launcher, connections: Connections) -> None:
        self._local, self._connections = local, connections
        self._lives = count(1)

    def start(self, run_dir: Path, node: Node) -> Process:
        if not node.host:
            return self._local.start(run_dir, node)
        connection = self._connections.to(node.host)
        process = RemoteProcess(next(self._lives), node, connection.kill)
        connection.start(process)
        return process

    def agents(self) -> Mapping[str, Callable[[], None]]:
        return self._connections.agents()

    def close(self) -> None:
        self._connections.close()
