"""What is no ZeroMQ of today at the socket of a hub without keys; random bytes are in `tests/fuzz`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import Place, shout, until

OLD_DIALECT = bytes([0x01, 0x00, 0x05, 0x00])
"""A greeting of ZMTP 1.0 without an identity, and the head of a message of four bytes."""


@pytest.fixture
def hub(place: Callable[..., Place]) -> Place:
    return place(Bound(1, 1, 1 << 20))


def test_a_message_in_a_dialect_that_does_not_tell_its_connection_is_refused_like_any_other(hub: Place) -> None:
    for text in (b"oops", bytes(4), b"\xff" * 4):
        shout(hub.address, OLD_DIALECT + text)
    until(lambda: hub.status()["refused"].get("malformed", 0) >= 3)


def test_a_well_formed_message_in_an_old_dialect_is_answered_like_any_other(hub: Place) -> None:
    header = wire.encode(wire.GetStatus(), request=3)[0]
    before = sum(hub.status()["refused"].values())
    shout(hub.address, b"\x01\x00", bytes([len(header) + 1, 0]) + header)
    assert sum(hub.status()["refused"].values()) == before
