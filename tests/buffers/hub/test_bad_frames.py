"""Frames that are malformed, too large, or contradict themselves: refused and counted, and the hub goes on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from async_rlhf.buffers.clients.connection import Connection
from async_rlhf.buffers.errors import RefusedError, WireError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport.link import SocketLink
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES
from tests.buffers.hub.place import (
    DEADLINE_S,
    Actor,
    Place,
    a_group,
    learner_of,
    peers,
    tensors,
    until,
)


def answer_to(hub: Place, frames: list[bytes]) -> wire.Message:
    link = SocketLink(hub.address, "stranger")
    try:
        assert link.send(frames)
        answer = link.receive(DEADLINE_S) or link.receive(DEADLINE_S)  # the first may be the connection
        assert answer is not None
        return wire.decode(answer, max_frame_bytes=1 << 20)[1]
    finally:
        link.close()


def test_malformed_and_oversized_frames_are_counted_and_answered_and_the_hub_goes_on(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8), max_frame_bytes=CHUNK_BYTES)
    put = packing.pack_group(a_group(0, 0, 0, "anna"))
    malformed: list[list[bytes]] = [
        [b""],
        [b"junk"],
        [b"\x93" * 500_000],
        [bytes(CHUNK_BYTES + 1)],
        [*wire.encode(wire.Bye()), bytes(CHUNK_BYTES + 1)],
        [b"\xc1"] * 50,
    ]
    for count, frames in enumerate(malformed, 1):
        answer = answer_to(hub, frames)
        assert isinstance(answer, wire.Refused)
        assert answer.reason in ("malformed", "oversized")
        assert sum(hub.status()["refused"].values()) == count
    for message, reason in (
        (wire.Put(group=put[0]), "unknown-actor"),
        (wire.Beat(capacity=1, fence=1, version=1), "unknown-actor"),
        (wire.Bye(), "unknown-actor"),
        (wire.Fetch(fence=1, version=5), "weights"),
        (wire.FetchChunk(fence=1, version=5, index=1 << 60), "weights"),
        (wire.Take(fence=0, step=0), "unregistered"),
        (wire.Welcome(incarnation="x", max_frame_bytes=1), "unknown-type"),
        (wire.Register(step=1 << 60, committed=0, learner="a"), "unknown-step"),
    ):
        answer = answer_to(hub, wire.encode(message, put[1] if isinstance(message, wire.Put) else None))
        assert isinstance(answer, wire.Refused), answer
        assert answer.reason == reason
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)


def test_a_frame_that_cuts_the_peer_does_not_end_the_hub(place: Callable[..., Place]) -> None:
    hub = place(Bound(2, 1, 8), max_frame_bytes=CHUNK_BYTES)
    link = SocketLink(hub.address, "stranger")
    assert link.send([bytes(5 * CHUNK_BYTES)])
    until(link.was_remade)
    link.close()
    assert hub.status()["refused"] == {}  # it never came


def test_a_known_actor_with_a_group_that_contradicts_itself_is_refused_and_keeps_its_lease(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    learner = learner_of(hub)
    ghost = Connection(SocketLink(hub.address, "ghost"))
    with peers(learner, ghost):
        learner.publish(0, tensors(0))
        hello = wire.Hello(actor="ghost", life="1", capacity=1, fence=learner.fence, version=0)
        assert isinstance(ghost.ask(hello, timeout_s=DEADLINE_S)[0], wire.Welcome)
        header, arrays = packing.pack_group(a_group(0, 0, 0, "ghost"))
        for group, frames, reason in (
            (header, arrays[:1], "lengths"),
            (header, [arrays[0], np.full(6, np.nan, "<f4").tobytes()], "logprobs"),
            (header.model_copy(update={"num_tokens": []}), [arrays[0][:8], b""], "field"),
            (header.model_copy(update={"number": -5}), arrays, "field"),
        ):
            with pytest.raises(RefusedError, match=reason):
                ghost.ask(wire.Put(group=group), frames, timeout_s=DEADLINE_S)
        answer, _ = ghost.ask(wire.Put(group=header), arrays, timeout_s=DEADLINE_S)
        assert answer == wire.Ack(groups=[(0, 0)])
        refused = hub.status()["refused"]  # a message whose answer is late is sent again, and counted again
        assert refused.keys() == {"lengths", "logprobs", "field"} and refused["field"] >= 2


def test_one_connection_that_says_hello_under_two_names_is_one_actor(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    ghost = Connection(SocketLink(hub.address, "ghost"))
    with peers(ghost):
        for name in ("ghost", "spook", "ghost"):
            ghost.ask(wire.Hello(actor=name, life="1", capacity=1, fence=0, version=-1), timeout_s=DEADLINE_S)
            assert list(hub.status()["actors"]) == [name]


def test_a_group_larger_than_the_hub_takes_is_refused_where_it_is_made(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 0, 8))
    anna, learner = Actor(hub), learner_of(hub)
    with peers(anna, learner):
        learner.publish(0, tensors(0))
        until(lambda: anna.begun, anna)
        with pytest.raises(WireError, match="cannot be sent: the limits are"):
            anna.put(0, text="x" * wire.MAX_HEADER_BYTES)


# Weights
