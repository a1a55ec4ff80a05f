"""What is no ZeroMQ of today, or none at all, at the socket of a hub without keys: it goes on, and so do the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from random import Random

import pytest

from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import DEADLINE_S, Place, train, until

OLD_DIALECT = bytes([0x01, 0x00, 0x05, 0x00])
"""A greeting of ZMTP 1.0 without an identity, and the head of a message of four bytes."""


@pytest.fixture
def hub(place: Callable[..., Place]) -> Place:
    return place(Bound(1, 1, 1 << 20))


def shout(hub: Place, *pieces: bytes) -> None:
    """Bytes at the hub's socket; the hub may hang up at any of them."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(DEADLINE_S)
        raw.connect(hub.address.removeprefix("ipc://"))
        try:
            for piece in pieces:
                raw.sendall(piece)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
        except OSError:
            pass


def test_a_message_in_a_dialect_that_does_not_tell_its_connection_is_refused_like_any_other(hub: Place) -> None:
    for text in (b"oops", bytes(4), b"\xff" * 4):
        shout(hub, OLD_DIALECT + text)
    until(lambda: hub.status()["refused"].get("malformed", 0) >= 3)


def test_a_well_formed_message_in_an_old_dialect_is_answered_like_any_other(hub: Place) -> None:
    header = wire.encode(wire.GetStatus(), request=3)[0]
    before = sum(hub.status()["refused"].values())
    shout(hub, b"\x01\x00", bytes([len(header) + 1, 0]) + header)
    assert sum(hub.status()["refused"].values()) == before


def test_random_bytes_end_neither_the_hub_nor_a_step_of_the_others(hub: Place) -> None:
    rng, anna, learner = Random(7), hub.actor(), hub.learner()
    beginnings = (b"", OLD_DIALECT, b"\x01\x00", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL", b"\xff" + bytes(8) + b"\x7f\x01\x05")
    for step in range(20):
        for _ in range(10):
            begin = rng.choice(beginnings)
            shout(hub, begin + rng.randbytes(rng.choice((1, 4, 60, 3000))))
        anna.makes(step)
        assert train(learner, step) == [step]
    assert hub.status()["step"] == 20
