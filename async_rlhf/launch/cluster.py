"""A Ray cluster as the hosts of a run. A process of its own joins it (`ray.main`), because Ray ends a process that has lost the
cluster's head, and the supervisor has to go on.

    owns        that process, and for each channel a socket to it
    waits for   the cluster to be joined, and an agent to be started there, `_ANSWER_S` each
    woken by    bytes of the process
    on close    the process ends, and the agents with it

When it has ended, the next connection begins another, which joins what answers at the same address then: the places of the run
stay, and nodes take them anew. Needs the extra `ray`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from contextlib import ExitStack, suppress
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.connection import START_S
from async_rlhf.launch.hosts import CommandChannel, Pipe
from async_rlhf.launch.sockets import socket_directory

_log = logging.getLogger(__name__)
_ANSWER_S = START_S + 10.0  # of a process that itself waits for as long as `START_S`
_END_S = 5.0


class RayCluster:
    """See `connection.Hosts`; its arguments are those of `ray.RayHosts`. Raises ConfigError as that does."""

    program = "import sys; from async_rlhf.launch.ray import main; sys.exit(main())"

    def __init__(self, address: str, most: int | None, *, on_gpus: bool) -> None:
        self.names, self._guard, self._number = tuple[str, ...](), threading.Lock(), 0
        self._asked: dict[str, Any] = {"address": address, "most": most, "on_gpus": on_gpus}
        with ExitStack() as stack:
            self._folder = stack.enter_context(socket_directory())
            if self._join()["is_begun"]:
                _log.warning("there is no Ray cluster here: one of this machine alone is started, and ends with this command")
            self._end = stack.pop_all()

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
            channel = ClusterChannel(self._asked["path"], self._process)
        channel.send(name.encode())
        if channel.receive(_ANSWER_S) is None:
            self._process.close()
            raise TimeoutError(f"the process that has joined the Ray cluster has not answered for {_ANSWER_S:.0f} s")
        return channel

    def close(self) -> None:
        self._process.close()
        self._end.close()

    def _join(self) -> dict[str, Any]:
        """What the process says of the cluster. Raises ConfigError."""
        self._number += 1
        self._asked |= {"names": self.names, "path": f"{self._folder}/ray-{self._number}"}
        try:
            self._process = CommandChannel(python("-c", self.program, json.dumps(self._asked)))
            answer = self._process.receive(_ANSWER_S) or b'{"error": "the Ray cluster was not joined in time"}'
        except OSError as error:
            answer = json.dumps({"error": f"launch.address = {self._asked['address']!r}: {error}"}).encode()
        joined: dict[str, Any] = json.loads(answer)
        if "error" in joined:
            self._process.close()
            raise ConfigError(joined["error"])
        self._asked["address"] = joined["address"]
        self.here, self.names, self.addresses = joined["here"], tuple(joined["names"]), tuple(joined["addresses"])
        return joined


class ClusterChannel:
    """See `connection.Channel`. The frames that are received have a byte in front: `+`, or `-` where the rest is the reason why
    there are no more. process: the one at the other end of the socket."""

    def __init__(self, path: str, process: CommandChannel) -> None:
        self._socket, self._process = socket.socket(socket.AF_UNIX), process
        self._socket.connect(path)
        self._pipe = Pipe(os.dup(self._socket.fileno()), os.dup(self._socket.fileno()))
        self.send = self._pipe.send

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            frame = self._pipe.receive(timeout_s)
        except OSError:
            self._process.receive(_END_S)  # raises its last words, which are Ray's, where it has ended
            raise
        if frame is not None and frame[:1] == b"-":
            raise ConnectionAbortedError(frame[1:].decode())
        return frame and frame[1:]

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
