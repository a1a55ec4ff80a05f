"""A Ray cluster as the hosts of a run. A process of its own joins it: Ray ends processes that lose the cluster's head, and the
supervisor goes on.

    owns        that process (`main`), and for each channel a socket to it
    waits for   the cluster to be joined and an agent to be started, `START_S` each
    woken by    bytes of the process
    on close    the process ends, and the agents with it

When the process has ended, the next connection begins another, which joins the cluster that is at the same address then; the
places of the run stay, and nodes take them anew. On a socket the supervisor sends the name of a place and then orders; it
receives each event behind `+`, and behind `-` why there are no more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.connection import START_S
from async_rlhf.launch.hosts import CommandChannel, Pipe
from async_rlhf.launch.sockets import socket_directory

if TYPE_CHECKING:
    from async_rlhf.launch.ray import RayChannel, RayHosts

_log = logging.getLogger(__name__)
_EVENT, _END = b"+", b"-"
_END_S = 5.0
_LOOK_S = 1.0
_FOREVER_S = 3600.0  # in one call: the other side's end is noticed at once


class RayCluster:
    """See `connection.Hosts`; arguments as of `ray.RayHosts`. Raises ConfigError when there is no such cluster, or no node of it
    can be used."""

    def __init__(self, address: str, most: int | None, *, on_gpus: bool) -> None:
        self.names, self._guard = tuple[str, ...](), threading.Lock()
        self._asked: dict[str, Any] = {"address": address, "most": most, "on_gpus": on_gpus}
        self._end = ExitStack()
        self._path = str(self._end.enter_context(socket_directory()) / "ray")
        try:
            self._join()
        except OSError as error:
            self._end.close()
            raise ConfigError(f"launch.address = {address!r}: {error}") from error
        except ConfigError:
            self._end.close()
            raise
        if self._has_begun_it:
            _log.warning("there is no Ray cluster here: one of this machine alone is started, and ends with this command")

    def connect(self, name: str) -> ClusterChannel:
        with self._guard:
            try:
                self._process.receive(0)
            except OSError:
                self._process.close()
                try:
                    self._join()
                except ConfigError as error:
                    raise ConnectionRefusedError(str(error)) from error
            channel = ClusterChannel(self._path, self._process)
        channel.send(name.encode())
        if channel.receive(2 * START_S) is None:
            channel.close()
            raise TimeoutError(f"Ray has started no agent within {2 * START_S:.0f} s")
        return channel

    def close(self) -> None:
        self._process.close()
        self._end.close()

    def _join(self) -> None:
        """Raises ConfigError, OSError."""
        asked = json.dumps({**self._asked, "names": self.names, "path": self._path})
        self._process = CommandChannel(python("-m", "async_rlhf.launch.cluster", asked))
        try:
            answer = self._process.receive(START_S)
        except OSError:
            self._process.close()
            raise
        joined = json.loads(answer or json.dumps({"error": f"the Ray cluster was not joined within {START_S:.0f} s"}))
        if "error" in joined:
            self._process.close()
            raise ConfigError(joined["error"])
        self._asked["address"], self.here = joined["address"], str(joined["here"])
        self.names, self.addresses = tuple(joined["names"]), tuple(joined["addresses"])
        self._has_begun_it = bool(joined["is_begun"])


class ClusterChannel:
    """See `connection.Channel`. process: the one at the other end of the socket."""

    def __init__(self, path: str, process: CommandChannel) -> None:
        self._socket, self._process = socket.socket(socket.AF_UNIX), process
        self._socket.connect(path)
        self._pipe = _pipe_of(self._socket)

    def send(self, frame: bytes) -> None:
        try:
            self._pipe.send(frame)
        except OSError as error:
            raise self._reason(error) from error

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            frame = self._pipe.receive(timeout_s)
        except OSError as error:
            raise self._reason(error) from error
        if frame is not None and frame[:1] == _END:
            raise ConnectionAbortedError(frame[1:].decode())
        return frame and frame[1:]

    def close(self) -> None:
        _shut(self._socket)

    def _reason(self, error: OSError) -> OSError:
        """What is known of the end of the process, where it has ended: Ray's last words."""
        try:
            self._process.receive(_END_S)
        except OSError as end:
            return end
        return error


def main() -> int:
    """Join the cluster, say so on standard output, and carry channels until standard input ends. Ray prints to standard error."""
    asked = json.loads(sys.argv[1])
    writes = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    supervisor = Pipe(os.dup(sys.stdin.fileno()), writes)
    from async_rlhf.launch.ray import RayHosts

    path, listener, carriers = Path(asked.pop("path")), socket.socket(socket.AF_UNIX), list[threading.Thread]()
    try:
        hosts = RayHosts(**asked)
    except ConfigError as error:
        supervisor.send(json.dumps({"error": str(error)}).encode())
        return 0
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=_accept, args=(listener, hosts, carriers), daemon=True).start()
    facts = {each: getattr(hosts, each) for each in ("names", "addresses", "here", "address", "is_begun")}
    with suppress(OSError):
        supervisor.send(json.dumps(facts).encode())
        while True:
            supervisor.receive(_FOREVER_S)
    for carrier in carriers:  # each closes its agent, for the supervisor has closed its channel
        carrier.join(_END_S)
    hosts.close()
    return 0


def _accept(listener: socket.socket, hosts: RayHosts, carriers: list[threading.Thread]) -> None:
    while True:
        carrier = threading.Thread(target=_carry, args=(listener.accept()[0], hosts), daemon=True)
        carrier.start()
        carriers.append(carrier)


def _carry(connection: socket.socket, hosts: RayHosts) -> None:
    """One channel, until one of its ends is gone."""
    pipe = _pipe_of(connection)
    try:
        channel = hosts.connect((pipe.receive(_END_S) or b"").decode())
        pipe.send(_EVENT)
        orders = threading.Thread(target=_carry_orders, args=(pipe, channel), daemon=True)
        orders.start()
        try:
            while orders.is_alive():
                if (event := channel.receive(_LOOK_S)) is not None:
                    pipe.send(_EVENT + event)
        finally:
            channel.close()
    except OSError as error:
        _tell_end(pipe, error)
    finally:
        _shut(connection)


def _carry_orders(pipe: Pipe, channel: RayChannel) -> None:
    try:
        while True:
            if (frame := pipe.receive(_FOREVER_S)) is not None:
                channel.send(frame)
    except OSError as error:
        _tell_end(pipe, error)


def _tell_end(pipe: Pipe, error: OSError) -> None:
    with suppress(OSError):  # it may be the supervisor that is gone
        pipe.send(_END + str(error).encode())


def _pipe_of(connection: socket.socket) -> Pipe:
    return Pipe(os.dup(connection.fileno()), os.dup(connection.fileno()))


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


if __name__ == "__main__":
    sys.exit(main())
