"""Weights from a learner through a hub to actors: mapped, in chunks or as deltas; late actors, superseded sets, kills."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.clients.actor import ActorState
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import DeltaSpec
from async_rlhf.buffers.weights.adoption import Adoption
from async_rlhf.buffers.weights.shared import HAS_SEALS
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import DEADLINE_S, until
from tests.buffers.weights.fleet import WHOLE, Adopter, Fleet, tensors
from tests.conftest import REPOSITORY

AUTO = WeightsConfig()
sealed = pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")


def test_after_the_whole_set_only_what_changed_travels(fleet: Callable[..., Fleet]) -> None:
    """From the learner to the hub and from the hub to the actor; a late joiner gets the whole set first."""
    hub = fleet()
    anna = hub.member("anna")
    hub.publish(0)
    anna.adopt(0)
    assert hub.weights["served_bytes"] == WHOLE
    for content in (1, 2):
        hub.publish(content)
        anna.adopt(content)
    weights = hub.weights
    assert weights["sets"] == 3 and weights["deltas"] == 2
    assert weights["served_bytes"] - WHOLE == weights["delta_bytes"] < 0.1 * WHOLE
    late = hub.member("late")
    late.adopt(2)
    assert hub.weights["served_bytes"] - weights["served_bytes"] == WHOLE
    hub.publish(3)
    anna.adopt(3)
    late.adopt(3)
    assert hub.weights["served_bytes"] - weights["served_bytes"] < 1.1 * WHOLE


def test_an_actor_that_missed_versions_gets_all_the_deltas_since(fleet: Callable[..., Fleet]) -> None:
    hub = fleet()
    anna = hub.member("anna")
    hub.publish(0)
    anna.adopt(0)
    for content in (1, 2, 3):
        hub.publish(content)
    until(lambda: anna.fence == hub.source.fence, anna)
    anna.check(3)
    assert hub.weights["served_bytes"] < 1.3 * WHOLE


def test_the_same_weights_under_a_new_fence_are_not_sent_again(fleet: Callable[..., Fleet]) -> None:
    hub = fleet()
    anna = hub.member("anna")
    for _ in range(2):
        hub.publish(0)
        anna.adopt(0)
    assert anna.fence == hub.source.fence
    assert hub.weights["served_bytes"] == WHOLE


def test_where_deltas_are_off_every_set_travels_whole(fleet: Callable[..., Fleet]) -> None:
    off = WeightsConfig(transport="chunks", delta=False)
    hub = fleet(off, off)
    anna = hub.member("anna", off)
    for content in (0, 1):
        hub.publish(content)
        anna.adopt(content)
    # A chunk that is late is requested again, and served again.
    assert hub.weights["deltas"] == 0 and hub.weights["served_bytes"] >= 2 * WHOLE


@sealed
def test_on_one_host_the_hub_sends_nothing_and_remote_actors_get_deltas_still(fleet: Callable[..., Fleet]) -> None:
    hub = fleet(AUTO, AUTO)
    anna, remote = hub.member("anna", AUTO), hub.member("remote")
    hub.publish(0)
    anna.adopt(0)
    assert hub.weights["served_bytes"] == 0
    assert hub.weights["sets_mapped"] == 1
    remote.adopt(0)
    for content in (1, 2):
        hub.publish(content)
        anna.adopt(content)
        remote.adopt(content)
    weights = hub.weights
    # The learner was told of the remote actor when it published content 1, so content 2 comes with a delta.
    assert weights["deltas"] == 1 and weights["sets_mapped"] == 3
    assert weights["served_bytes"] == 2 * WHOLE + weights["delta_bytes"]


@sealed
def test_an_actor_that_cannot_map_what_it_is_offered_fetches_chunks(fleet: Callable[..., Fleet]) -> None:
    class Elsewhere(Adopter):
        """Its machine has no process of that number."""

        def look(self) -> None:
            fetching = self.client._weight_receiver
            honest = fetching._begin

            def begin(manifest: wire.Manifest) -> None:
                places = [place.model_copy(update={"pid": 1 << 30}) for place in manifest.places]
                honest(manifest.model_copy(update={"places": places}))

            fetching._begin = begin  # type: ignore[method-assign]
            try:
                super().look()
            finally:
                fetching._begin = honest  # type: ignore[method-assign]

    hub = fleet(AUTO, AUTO)
    hub.publish(0)
    hub.keep(Elsewhere(hub, "anna", AUTO)).adopt(0)
    assert hub.weights["served_bytes"] == WHOLE


def test_an_actor_that_does_not_adopt_in_its_time_is_dropped_and_comes_back(fleet: Callable[..., Fleet]) -> None:
    hub = fleet(progress_timeout_s=5.0)
    anna, stubborn = hub.member("anna"), hub.member("stubborn")
    hub.publish(0)
    anna.adopt(0)

    def dropped() -> int:
        anna.look()
        stubborn.client.poll(ActorState(0, 0, -1, ()), wire.Telemetry(), timeout_s=0.02)  # beats, and never adopts
        return int(hub.weights["dropped_actors"])

    seen = list[dict[str, Any]]()

    def dropped_or_seen() -> int:
        seen.append(hub.status()["actors"].get("stubborn", {}))
        return dropped()

    until(dropped_or_seen)
    assert "behind_s" not in hub.status()["actors"]["anna"]
    reasons = {(shown["version"], shown["behind_version"], shown["behind_because"]) for shown in seen if "behind_s" in shown}
    assert reasons == {(-1, 0, str(Adoption.FETCHES))}
    assert "anna" in hub.status()["actors"]
    stubborn.adopt(0)
    until(lambda: hub.status()["actors"].get("stubborn", {}).get("version") == 0, stubborn)


LEARNER = """
import os, sys
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.tensors import RawTensor
client = LearnerClient(sys.argv[1], timeout_s=30)
client.register(0, 0)
connection = client._weight_connection
honest = connection.ask
def ask(message, **options):
    if message.type == "publish":
        print("all parts but no announcement", flush=True)
        sys.stdin.read()
    return honest(message, **options)
connection.ask = ask
client.publish(0, {"w": RawTensor("uint8", (1 << 20,), bytes(1 << 20))})
"""


@sealed
def test_a_learner_killed_while_it_publishes_leaves_nothing_behind(fleet: Callable[..., Fleet]) -> None:
    hub = fleet(AUTO, AUTO)
    before = _mapped()
    killed = subprocess.Popen(
        [sys.executable, "-c", LEARNER, hub.address], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert killed.stdout is not None and killed.stdout.readline() == b"all parts but no announcement\n"
    finally:
        killed.kill()
        killed.communicate()
    assert hub.status()["version"] is None, "no half of a set is announced"
    hub.publish(1)
    anna = hub.member("anna", AUTO)
    anna.adopt(1)
    anna.close()
    assert _mapped() - before <= 3, "the newest set, as learner, hub and actor of this process map it"
    assert not [name for name in os.listdir("/dev/shm") if "async-rlhf" in name]


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("async-rlhf-weights")


def test_a_learner_that_says_twice_the_same_is_answered_and_believed_once(fleet: Callable[..., Fleet]) -> None:
    hub = fleet()
    hub.source.register(0, 0)
    fence = hub.source.fence
    weights = WeightSet.of(fence, 0, tensors(0))

    def ask(message: wire.Message, arrays: list[bytes] | None = None) -> wire.Message:
        return hub.source._connection.ask(message, arrays, timeout_s=DEADLINE_S)[0]

    wanted = wire.Wanted(chunks=True, delta=False, delta_next=True)
    for index in (0, 0, 2, 1, 2):
        assert ask(weights.announcement()) == wanted
        chunk = wire.Chunk(fence=fence, version=0, index=index)
        assert ask(chunk, [bytes(weights.chunk(index))]) == wire.Done()
        assert ask(wire.Check(fence=fence, version=0)) == wire.Checked(done=False)
    last = wire.Chunk(fence=fence, version=0, index=3), [bytes(weights.chunk(3))]
    assert ask(*last) == ask(*last) == ask(weights.announcement()) == wire.Done()
    assert ask(wire.Check(fence=fence, version=0)) == wire.Checked(done=True)
    assert hub.weights["sets"] == 1


def test_a_delta_that_is_not_of_the_announced_set_is_refused(fleet: Callable[..., Fleet]) -> None:
    hub = fleet()
    hub.source.register(0, 0)
    weights = WeightSet.of(hub.source.fence, 0, tensors(0))
    for spec in (
        DeltaSpec(base="0", result="1", num_bytes=8),
        DeltaSpec(base="0", result=weights.digest, num_bytes=len(weights.blob)),
    ):
        with pytest.raises(RefusedError, match="is none of this set"):
            hub.source._connection.ask(weights.announcement().model_copy(update={"delta": spec}), timeout_s=DEADLINE_S)
