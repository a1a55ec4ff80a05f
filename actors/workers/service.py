"""The loop of a server that runs users' code: a scorer, a reward server, an environment server.

owns        a ROUTER socket and the list of its clients; nothing that a restart must keep
waits for   messages, key exchanges, and what `wake` announces; looks up twice a second
woken by    the socket, and by `wake` from any thread
on close    `_close`, then what is unsent has half a second; clients send again what was not answered

A client that is silent is dropped with all that it requested.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import zmq

from async_rlhf.buffers.errors import ConfigError, RewardError, WireError
from async_rlhf.buffers.protocol.codec import Codec
from async_rlhf.buffers.protocol.message import MessageBase
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.server import ServerSocket

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_MAX_UNREAD = 1000
# Refused handshakes are logged once in so many seconds.
_REPORT_S = 10.0


@dataclass
class Client:
    """peer: its identity. last_seen: monotonic time of its last message, or of what it waits for if that is later."""

    peer: bytes
    last_seen: float


Kind = TypeVar("Kind", bound=Client)


class Service(Generic[Kind]):
    """See the module docstring. `run` serves until `stop`. counters: of messages, by what became of them."""

    num_frames: ClassVar[int]

    def __init__(
        self,
        what: str,
        address: str,
        key_dir: Path | None,
        codec: Codec[Any],
        silent_s: float,
        max_unsent: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """what: is served, for messages. max_unsent: messages that wait for one client; 0: all, none is dropped. silent_s:
        after that a client is gone. Raises ConfigError for an address it may not or cannot have."""
        if key_dir is None and not address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:")):
            raise ConfigError(
                f"address = {address!r}: without keys {what} is served on this machine only. Use tcp://127.0.0.1:PORT or "
                "an ipc:// path, or make keys (async-rlhf keys new DIR) and name them with --keys."
            )
        self._codec, self._silent_s, self._clock = codec, silent_s, clock
        self._clients: dict[bytes, Kind] = {}
        self._stopped = False
        self.counters = {"refused": 0}
        try:
            self._socket = ServerSocket(
                address,
                None if key_dir is None else keys.load_hub(key_dir),
                max_part_bytes=codec.max_bytes,
                max_message_bytes=2 * codec.max_bytes,
                max_unread=_MAX_UNREAD,
                max_unsent=max_unsent,
                linger_ms=500,
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"address = {address!r} cannot be used: {error}") from error
        self.address = self._socket.address

    def run(self) -> None:
        """Serve until `stop`; raises RewardError or EpisodeError when the processes of users' code do not come up."""
        looked = reported = self._clock()
        try:
            while not self._stopped:
                self._socket.wait(_LOOK_S)
                self._receive()
                self._advance()
                now = self._clock()
                if now - looked > _LOOK_S:
                    looked = now
                    self._look(now)
                    self._socket.cut_unfinished()
                if now - reported > _REPORT_S:
                    reported = now
                    self._socket.report()
        finally:
            self._close()
            self._socket.close()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        self._stopped = True
        self._socket.wake()

    def wake(self) -> None:
        """There is something for `_advance`; from any thread."""
        self._socket.wake()

    def _receive(self) -> None:
        while (received := self._socket.receive()) is not None:
            peer, *frames = map(bytes, received[0])
            try:
                if len(frames) != self.num_frames:
                    raise WireError(f"what is no message: {len(frames)} frames, not {self.num_frames}")
                self._handle(peer, self._codec.unpack(frames[-1]))
            except (WireError, RewardError) as error:
                self.counters["refused"] += 1
                _log.warning("refused: %s", error)
                self._refuse(peer, frames, str(error))

    def _look(self, now: float) -> None:
        """Drop silent clients."""
        for peer, client in list(self._clients.items()):
            if now - client.last_seen > self._silent_s:
                del self._clients[peer]
                self._drop(client)

    def _send(self, peer: bytes, message: MessageBase) -> None:
        """Dropped where a client does not read: it sends its request again."""
        self._socket.send([[peer, self._codec.pack(message)]])

    # -- what a kind of server adds ----------------------------------------------------------------------------------

    def _handle(self, peer: bytes, message: Any) -> None:
        """Raises WireError or RewardError for a message that is refused."""
        raise NotImplementedError

    def _refuse(self, peer: bytes, frames: list[bytes], reason: str) -> None:
        """Answer a message that was refused, where its sender can be reached."""

    def _advance(self) -> None:
        """Answer with what there is."""
        raise NotImplementedError

    def _drop(self, client: Kind) -> None:
        """Nothing that this client asked for is needed any more."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError
