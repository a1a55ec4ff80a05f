"""Messages that never end, or take long, by a peer that writes ZeroMQ's protocol (ZMTP 3, RFC 23) itself: libzmq would not."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport.server import ServerSocket
from tests.buffers.hub.place import DEADLINE_S, Place, until
from tests.conftest import kept_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how many bytes a connection has received")
MAX_FRAME = 1 << 20
PIECE = b"".join(b"\x03" + struct.pack(">Q", 1 << 18) + bytes(1 << 18) for _ in range(8))
"""Eight parts of 256 KiB, each of which says that more will come."""


@contextmanager
def by_hand(address: str) -> Iterator[socket.socket]:
    """A connection that has shaken hands as a DEALER."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as raw:
        raw.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # small pieces are not kept back until others are acknowledged
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        heard = b""
        while len(heard) < 64:
            heard += raw.recv(64 - len(heard))
        yield raw


@pytest.fixture
def hub(place: Callable[..., Place], stack: ExitStack) -> Place:
    return place(Bound(1, 1, 8), f"tcp://127.0.0.1:{stack.enter_context(kept_port())}", max_frame_bytes=MAX_FRAME)


def test_a_message_that_does_not_end_is_cut_and_the_others_are_answered_meanwhile(hub: Place) -> None:
    with by_hand(hub.address) as raw, hub.control() as operator:
        sent = 0
        raw.settimeout(10)  # a connection that was cut may also just stand still
        with suppress(OSError):
            while sent < 1 << 31:
                raw.sendall(PIECE)
                sent += len(PIECE)
                operator.status()  # others are answered meanwhile
        assert 64 << 20 < sent < 1 << 31, "more than an honest message, and not without end"
        until(lambda: operator.status()["endless_messages"] == 1)


def test_who_sends_as_much_in_messages_that_end_is_not_cut(hub: Place) -> None:
    last = b"\x02" + struct.pack(">Q", 1 << 10) + bytes(1 << 10)
    with by_hand(hub.address) as raw, hub.control() as operator:
        for _ in range(60):
            raw.sendall(PIECE + last)
            operator.status()
        until(lambda: operator.status()["refused"].get("malformed", 0) == 60)
        assert operator.status()["endless_messages"] == 0


def test_bytes_that_still_arrive_keep_a_lease(place: Callable[..., Place], stack: ExitStack) -> None:
    """A large group over a slow uplink, with the beats behind it."""
    now = [0.0]
    address = f"tcp://127.0.0.1:{stack.enter_context(kept_port())}"
    hub = place(Bound(1, 1, 8), address, lease_s=2.0, wanted={"clock": lambda: now[0]})
    hello = wire.encode(wire.Hello(actor="far", life="1", capacity=1, fence=0, version=-1))[0]
    beat = wire.encode(wire.Beat(capacity=2, fence=0, version=-1))[0]
    with by_hand(address) as raw:
        raw.sendall(b"\x02" + struct.pack(">Q", len(hello)) + hello)
        until(lambda: "far" in hub.status()["actors"])
        raw.sendall(b"\x02" + struct.pack(">Q", len(beat)) + beat)
        until(lambda: hub.status()["actors"]["far"]["capacity"] == 2)
        raw.sendall(b"\x02" + struct.pack(">Q", 1 << 20))

        def later() -> bool:
            now[0] += 0.1
            return "far" not in hub.status()["actors"]

        while now[0] < 8.0:
            raw.sendall(bytes(1 << 10))
            assert not later(), f"after {now[0]} s"
        until(later)


@pytest.fixture
def server() -> Iterator[ServerSocket]:
    with closing(ServerSocket("tcp://127.0.0.1:*", max_part_bytes=99, max_message_bytes=99, max_unread=10)) as made:
        yield made


def test_a_connection_that_has_the_number_of_one_that_ended_is_known_by_its_own_sender(server: ServerSocket) -> None:
    """Also when its first message is received before the monitor's events are read."""

    def sender(raw: socket.socket) -> bytes:
        raw.sendall(b"\x00\x01x")
        received: list[bytes] = []
        until(lambda: received.extend(found[0][:1] if (found := server.receive()) else ()) or received)
        return received[0]

    def is_closed() -> bool:
        with suppress(OSError):
            os.fstat(descriptor)
            return False
        return True

    with open(os.devnull) as lower, by_hand(server.address) as raw:
        sender(raw)
        (descriptor,) = server._open
        raw.shutdown(socket.SHUT_WR)
        until(is_closed)
        lower.close()  # the peer's end takes this number, and so the server's end the other
        with by_hand(server.address) as again:
            identity = sender(again)
            server.wait(0)
            assert [connection.identity for connection in server._open.values()] == [identity]


def test_a_message_that_is_received_when_its_connection_has_ended_leaves_nothing_of_that(server: ServerSocket) -> None:
    """Its number may be another socket's by then."""
    with by_hand(server.address) as raw:
        raw.sendall(b"\x00\x01x")
        raw.shutdown(socket.SHUT_WR)
        until(lambda: server.wait(0.01) or server.counters["connections_ended"])
        until(server.receive)
    assert server._open == {}
