"""One peer's end of the wire: frames in and out, nothing about what they say. The seam that a simulator replaces.

A DEALER socket reconnects by itself when the connection broke or the hub comes back at the same address; `was_remade`
reports it, because messages may then be lost both ways. ZeroMQ does not report a handshake that fails, and tries again for
ever or never again: the socket's monitor is watched, and an error gives the reason.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rlhf.buffers.errors import ConfigError, DeadlineError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.frames import Waker, bytes_received, receive, send
from async_rlhf.buffers.transport.keys import PeerKeys, load_peer

# HWM counts messages, not bytes, and only those that wait. Sent to a hub that is away: a minute's beats and every group an
# actor holds, after which `send` refuses. Received: an actor asks for a few chunks of weights of 1 MiB at a time.
_SEND_HWM = 1000
_RECEIVE_HWM = 1000
# A handshake that breaks off may be a hub that was killed in the middle of it; at the pauses below these take a second.
_MAX_FAILED_HANDSHAKES = 20
_HANDSHAKES_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Link(Protocol):
    """One thread sends and receives; `wake` may come from any."""

    def send(self, frames: wire.Frames) -> bool:
        """Hand frames over without waiting; False when so much waits already that no more fits."""
        ...

    def receive(self, timeout_s: float) -> wire.Frames | None:
        """The next message; None after `timeout_s`, or earlier after `wake` or when the connection was made."""
        ...

    def was_remade(self) -> bool:
        """Whether the connection broke and was made again since the last call."""
        ...

    def is_receiving(self) -> bool:
        """Whether bytes have come since the last call, be it of a message that is not whole yet (TCP, on Linux)."""
        ...

    def wake(self) -> None:
        """End a waiting `receive`."""
        ...

    def clock(self) -> float:
        """Seconds of the clock that deadlines are counted on."""
        ...

    def close(self) -> None: ...


Connect = Callable[[str, str], Link]
"""(address, name of the peer) -> its link."""


class SocketLink:
    """A DEALER socket, with `keys` an encrypted one that speaks only to the hub whose public key they hold.

    Owns its context and a bell to be woken by; on close drops what was not sent within half a second.
    `receive` and `was_remade` raise DeadlineError, with the reason, when the handshake is refused or fails again and again.
    """

    def __init__(self, address: str, name: str, *, keys: PeerKeys | None = None) -> None:
        self._address, self._keyed = address, keys is not None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{name}-{secrets.token_hex(6)}".encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.hub_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _HANDSHAKES_FAILED
        )
        self._descriptor: int | None = None  # of the connection, while there is one
        self._received = 0
        self._socket.connect(address)
        self._connected = self._remade = False
        self._num_failed = 0
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._waker.descriptor, zmq.POLLIN)

    @property
    def sockets(self) -> list[Any]:
        """What a poller waits for, when it waits for several links."""
        return [self._socket, self._monitor, self._waker.descriptor]

    def send(self, frames: wire.Frames) -> bool:
        return send(self._socket, frames)

    def receive(self, timeout_s: float) -> wire.Frames | None:
        until = time.monotonic() + timeout_s
        while True:
            ready = dict(self._poller.poll(max(0, int((until - time.monotonic()) * 1000))))
            if self._waker.descriptor in ready:
                self._waker.clear()
            is_made = self._monitor in ready and self._watch()
            if self._socket in ready:
                return receive(self._socket)
            if is_made or not ready or self._waker.descriptor in ready:
                return None

    def was_remade(self) -> bool:
        self._watch()
        remade, self._remade = self._remade, False
        return remade

    def is_receiving(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                before, self._received = self._received, bytes_received(connection)
        except OSError:  # it has just been closed
            return False
        return self._received > before

    def wake(self) -> None:
        self._waker.ring()

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        self._waker.close()

    def _watch(self) -> bool:
        """Take in what the monitor saw; whether the connection was made."""
        is_made = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                is_counted = event["event"] == zmq.EVENT_CONNECTED and self._address.startswith("tcp:")
                self._descriptor = event["value"] if is_counted else None
                self._received = 0
                continue
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._remade, self._connected = self._remade or self._connected, True
                self._num_failed, is_made = 0, True
                continue
            self._num_failed += 1
            # After these two ZeroMQ does not try again, and nothing would ever be heard.
            final = event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            if final or self._num_failed >= _MAX_FAILED_HANDSHAKES:
                raise DeadlineError(f"the handshake failed: {self._address}: {self._reason(event['event'])}")
        return is_made

    def _reason(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "this key is not allowed; its public key must be in allowed/ of the hub's machine"
        if self._keyed:
            return "hub.public in security.keys is not the key of that hub, or that hub has no keys"
        return "that hub asks for keys (security.keys), or it is no hub"


def connector(directory: Path | None) -> Connect:
    """Makes links with the keys in this directory, or without keys. Raises ConfigError when they cannot be read."""
    if directory is None:
        return SocketLink
    check_curve()
    return partial(SocketLink, keys=load_peer(directory))


def new_pair() -> tuple[bytes, bytes]:
    """A fresh (public, secret) CURVE key pair in Z85."""
    check_curve()
    return zmq.curve_keypair()


def check_curve() -> None:
    """Raises ConfigError when ZeroMQ was built without encryption."""
    if not zmq.has("curve"):
        raise ConfigError("security.keys: this pyzmq was built without CURVE; install a wheel of pyzmq that has it")
