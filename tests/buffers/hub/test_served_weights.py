"""Weight sets that are damaged or superseded while actors fetch them, some of which have slow links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from async_rlhf.buffers.clients.learner import TakenBatch
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet
from tests.buffers.hub.place import DEADLINE_S, QUICK_LEASE_S, Begun, Place, holds, taken, tensors, train, until

SIZE = 9 * CHUNK_BYTES


def test_a_corrupted_chunk_is_refused_and_the_old_version_stays_served(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(1, 1, 8))
    raw = learner._connection
    anna.makes(0)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    good = WeightSet.of(learner.fence, 1, tensors(1, size=CHUNK_BYTES + 9))
    raw.ask(good.announcement(), timeout_s=DEADLINE_S)
    raw.ask(wire.Chunk(fence=learner.fence, version=1, index=0), [good.chunk(0)], timeout_s=DEADLINE_S)
    spoiled = bytes([good.chunk(1)[0] ^ 1]) + good.chunk(1)[1:]
    with pytest.raises(RefusedError, match="weights: version 1: tensor 'w' does not match its digest"):
        raw.ask(wire.Chunk(fence=learner.fence, version=1, index=1), [spoiled], timeout_s=DEADLINE_S)
    assert hub.status()["version"] == 0
    ben = hub.actor("ben")
    until(lambda: ben.adopted, ben)
    assert ben.adopted == [(learner.fence, 0)]
    assert ben.tensors == anna.tensors
    learner.publish(1, tensors(1, size=CHUNK_BYTES + 9))
    until(lambda: anna.version == ben.version == 1, anna, ben)


def test_a_fetch_that_is_superseded_ends_with_the_newer_version(place: Callable[..., Place]) -> None:
    """Ben has the manifest of version 0 and asks for its chunks when they are gone already."""
    hub = place(Bound(1, 1, 8))
    anna, ben, learner = hub.actor(), hub.actor("ben", capacity=0), hub.learner(publishes=False)
    learner.publish(0, tensors(0, SIZE))
    ben.look()
    anna.makes(0)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    learner.publish(1, tensors(1, SIZE))
    until(lambda: ben.version == 1, ben)
    assert ben.tensors == {name: bytes(tensor.data) for name, tensor in tensors(1, SIZE).items()}


def test_a_set_that_is_replaced_while_it_is_fetched_is_fetched_again(place: Callable[..., Place]) -> None:
    """A restored learner publishes the same version with other bits: no actor serves a mixture."""
    hub = place(Bound(1, 1, 8))
    anna, first = hub.actor(weights=WeightsConfig(transport="chunks")), hub.learner(publishes=False)
    first.publish(0, tensors(0, SIZE))
    receiver, asked = anna.client._weight_receiver, list[wire.FetchChunk]()
    send = receiver._send

    def hold(message: Any) -> int:
        if isinstance(message, wire.FetchChunk) and message.index >= 4:
            asked.append(message)
            return 0
        return send(message)

    receiver._send = hold
    until(lambda: asked, anna)  # in the middle of it
    second = hub.learner(publishes=False)
    second.publish(0, tensors(99, SIZE))
    receiver._send = send
    for message in asked:
        send(message)
    until(lambda: anna.fence == second.fence, anna)
    assert anna.tensors["w"] == bytes(tensors(99, SIZE)["w"].data)


def test_in_exact_mode_older_versions_are_served_again_after_a_restart(place: Callable[..., Place]) -> None:
    """Group 1 is of version 0, whenever it is made: its actor dies when version 1 is out, and then the hub."""
    hub = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4, exact=True), lease_s=QUICK_LEASE_S)
    ghost, learner = hub.actor("ghost"), hub.learner()
    until(lambda: len(ghost.begun) == 2, ghost)
    ghost.makes(0)
    assert train(learner, 0) == [0]
    ghost.vanish()
    hub.restart()
    learner.register(1, 1)
    learner.publish(1, tensors(1))
    anna = hub.actor()
    for number in (1, 2, 3):
        until(holds(anna, number), anna)
        assert anna.version == number - 1
        anna.makes(number)
        batch = learner.take(number)
        assert isinstance(batch, TakenBatch)
        assert [group.oldest_version for group in batch.groups] == [number - 1]
        learner.trained(number)
        learner.publish(number + 1, tensors(number + 1))


def test_a_slow_actor_is_told_of_a_newer_set_only_when_the_one_it_fetches_can_earn_nothing_more(
    place: Callable[..., Place],
) -> None:
    hub = place(Bound(groups_per_batch=1, max_staleness=4, num_groups=40))
    fast, slow, learner = hub.actor("fast", capacity=1), hub.stranger("slow"), hub.learner(publishes=False)
    told: list[int] = []

    def listen() -> bool:
        while (received := slow.receive(0.0)) is not None:
            if isinstance(received[1], wire.Adopt):
                told.append(received[1].version)
        return bool(told)

    hello = wire.Hello(actor="slow", life="1", capacity=1, fence=0, version=-1)
    assert isinstance(slow.ask(hello, timeout_s=DEADLINE_S)[0], wire.Welcome)
    learner.publish(0, tensors(0))
    for step in range(12):
        until(listen, fast)
        fast.makes(step)
        assert train(learner, step) == [step]
        slow.send(wire.Beat(capacity=1, fence=0, version=-1))
        asked = wire.Fetch(fence=learner.fence, version=told[-1])
        if told[-1] >= step - 1:  # within the bound of what is begun next
            assert isinstance(slow.ask(asked, timeout_s=DEADLINE_S)[0], wire.Manifest), "the set is still there"
    listen()
    assert told == sorted(set(told)) and told[0] == 0
    assert 2 <= len(told) <= 5, f"of 12 versions it was told of {told}"
