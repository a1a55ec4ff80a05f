"""Dialects of former ZeroMQs, frames that are too large, two names: the hub goes on. Random bytes are in `tests/fuzz`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES
from tests.buffers.hub.place import DEADLINE_S, Place, holds, shout, until

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


def test_a_frame_that_cuts_the_peer_does_not_end_the_hub(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8), max_frame_bytes=CHUNK_BYTES)
    link = hub.stranger("stranger").link
    assert link.send([bytes(5 * CHUNK_BYTES)])
    until(link.was_remade)
    assert hub.status()["refused"] == {}  # it never came


def test_one_connection_that_says_hello_under_two_names_is_one_actor(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    ghost = hub.stranger("ghost")
    for name in ("ghost", "spook", "ghost"):
        ghost.ask(wire.Hello(actor=name, life="1", capacity=1, fence=0, version=-1), timeout_s=DEADLINE_S)
        assert list(hub.status()["actors"]) == [name]


def test_a_group_larger_than_the_hub_takes_is_refused_where_it_is_made(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    anna, _ = hub.actor(), hub.learner()
    until(holds(anna, 0), anna)
    with pytest.raises(WireError, match="cannot be sent: the limits are"):
        anna.put(0, text="x" * wire.MAX_HEADER_BYTES)
