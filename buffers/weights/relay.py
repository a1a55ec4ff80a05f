"""A relay between the hub and the actors of one host, or of one site: to the actors it is the hub.

    owns        a ROUTER socket, and through `proxy` one link to the hub for each actor, one more to fetch by, and the newest
                weight sets; one thread
    waits for   a message from an actor or from the hub
    woken by    any of them, or `stop`
    on close    sockets closed; actors say Hello to whoever comes back at its address

What actors and the hub say to each other goes through unchanged, but for weights: a set, or the deltas to it, is fetched
from the hub once, verified, and served from here to all who ask, over memory where they are on this machine. So what the
hub sends does not grow with the number of actors behind a relay; relays may stand behind relays. Nobody's groups are here:
a relay that dies loses nothing.
"""

from __future__ import annotations

import threading
import time

import zmq

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.hub.authenticator import UNREAD_BY_ZMQ, Authenticator
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.frames import send
from async_rlhf.buffers.transport.keys import HubKeys
from async_rlhf.buffers.transport.link import Connect, Link, SocketLink
from async_rlhf.buffers.weights.proxy import RelayProxy

_TICK_S = 1.0
_MAX_FRAME_BYTES = 128 << 20
_MAX_UNFINISHED = wire.MAX_HEADER_BYTES + 2 * _MAX_FRAME_BYTES + UNREAD_BY_ZMQ
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
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)  # beyond it ZeroMQ cuts the actor by itself
        self._socket.setsockopt(zmq.RCVHWM, _UNREAD)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._authenticator = Authenticator(self._context, self._socket, access)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._authenticator.close()
            self._context.destroy(linger=0)
            raise ConfigError(f"{address!r} cannot be listened at: {error}") from error
        self._poller = zmq.Poller()
        for waited_for in (self._socket, *self._authenticator.sockets):
            self._poller.register(waited_for, zmq.POLLIN)
        self._proxy = RelayProxy(hub_address, config, self._open, self._close)
        self._stopped, self._ending = False, threading.RLock()  # `stop` may come while `run` ends

    def stop(self) -> None:
        """End `run`; may be called from any thread, also when it has ended."""
        with self._ending:
            self._stopped = True
            if not self._socket.closed:
                self._proxy.wake()

    def run(self) -> None:
        """Serve until `stop`. Raises DeadlineError, with the reason, when the hub does not let this relay in."""
        next_tick = 0.0
        try:
            while not self._stopped:
                self._poller.poll(0 if self._proxy.has_work else int(_TICK_S * 1000))
                self._authenticator.attend()
                while (received := self._authenticator.receive()) is not None:
                    (identity, *message), holder = received
                    self._proxy.take(identity, message, holder)
                self._proxy.turn()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    self._authenticator.cut_endless(_MAX_UNFINISHED)
                    self._authenticator.report()
                    self._proxy.tick()
                for message in self._proxy.outbox:
                    send(self._socket, message)  # never blocks: an actor that is gone, or too slow, loses it
                self._proxy.outbox.clear()
        finally:
            with self._ending:
                self._authenticator.close()
                self._context.destroy(linger=0)
                self._proxy.close()

    def _open(self, name: str) -> Link:
        link = self._connect(self._hub_address, name)
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._poller.register(waited_for, zmq.POLLIN)
        return link

    def _close(self, link: Link) -> None:
        assert isinstance(link, SocketLink)
        for waited_for in link.sockets:
            self._poller.unregister(waited_for)
        link.close()
