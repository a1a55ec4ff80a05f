"""A relay between the hub and the actors of one host, or of one site: to the actors it is the hub.

    owns        a ROUTER socket, and through `proxy` one link to the hub for each actor, one more to fetch by, and the newest
                weight sets; one thread
    waits for   a message from an actor or from the hub
    woken by    any of them, or `stop`
    on close    sockets closed; actors send Hello to the next relay at its address

Messages of actors and hub go through unchanged, but for weights: a set, or the deltas to it, is fetched
from the hub once, verified, and served from here to all who ask, over memory where they are on this machine. So what the
hub sends does not grow with the number of actors behind a relay; relays may stand behind relays. It holds no groups: a
relay that dies loses nothing.
"""

from __future__ import annotations

import time

import zmq

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.protocol.wire import MAX_HEADER_BYTES
from async_rlhf.buffers.transport.keys import HubKeys
from async_rlhf.buffers.transport.link import Connect, Link, SocketLink
from async_rlhf.buffers.transport.server import ServerSocket
from async_rlhf.buffers.weights.proxy import RelayProxy

_TICK_S = 1.0
_MAX_FRAME_BYTES = 128 << 20
_MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + 2 * _MAX_FRAME_BYTES
_UNREAD = 16  # messages of one actor that may wait here; then it waits


class Relay:
    """Raises ConfigError when the address is taken or cannot be. `access` as for a hub, `connect` as for an actor."""

    def __init__(
        self,
        hub_address: str,
        address: str,
        config: WeightsConfig,
        connect: Connect = SocketLink,
        access: HubKeys | None = None,
    ) -> None:
        self._hub_address, self._connect = hub_address, connect
        try:
            self._socket = ServerSocket(
                address, access, max_part_bytes=_MAX_FRAME_BYTES, max_message_bytes=_MAX_MESSAGE_BYTES, max_unread=_UNREAD
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"{address!r} cannot be listened at: {error}") from error
        self._proxy = RelayProxy(hub_address, config, self._open, self._close)
        self._stopped = False

    def stop(self) -> None:
        """End `run`; may be called from any thread, also when it has ended."""
        self._stopped = True
        self._socket.wake()

    def run(self) -> None:
        """Serve until `stop`. Raises DeadlineError, with the reason, when the hub does not let this relay in."""
        next_tick = 0.0
        try:
            while not self._stopped:
                self._socket.wait(0 if self._proxy.has_work else _TICK_S)
                while (received := self._socket.receive()) is not None:
                    (identity, *message), holder = received
                    self._proxy.take(identity, message, holder)
                self._proxy.turn()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    self._socket.cut_unfinished()
                    self._socket.report()
                    self._proxy.tick()
                self._socket.send(self._proxy.outbox)
                self._proxy.outbox.clear()
        finally:
            self._proxy.close()
            self._socket.close()

    def _open(self, name: str) -> Link:
        link = self._connect(self._hub_address, name)
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._socket.register(waited_for)
        return link

    def _close(self, link: Link) -> None:
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._socket.unregister(waited_for)
        link.close()
