"""Weights from a learner through a hub to actors: mapped, in chunks or as deltas; late actors, superseded sets, kills."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rlhf.buffers.clients.actor import ActorState
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.weights.shared import HAS_SEALS
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.weights.fleet import CHUNKS, DEADLINE_S, SIZE, Actor, Fleet, actors, tensors, until, words

REPOSITORY = Path(__file__).resolve().parents[3]
sealed = pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")


@pytest.fixture
def fleet(tmp_path: Path, socket_dir: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(hub: WeightsConfig = CHUNKS, learner: WeightsConfig = CHUNKS) -> Fleet:
        made.append(Fleet(tmp_path / "run", f"ipc://{socket_dir}/hub", hub, learner))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_after_the_whole_set_only_what_changed_travels(fleet: Callable[..., Fleet]) -> None:
    """From the learner to the hub and from the hub to the actor; a late joiner gets the whole set first."""
    place = fleet()
    anna, ben = Actor(place, "anna"), Actor(place, "ben")
    with actors(anna, ben):
        place.publish(0)
        anna.adopt(0)
        whole = place.status()["weights"]["served_bytes"]
        assert whole == 2 * SIZE + 4
        for content in (1, 2):
            place.publish(content)
            anna.adopt(content)
        weights = place.status()["weights"]
        assert weights["sets"] == 3 and weights["deltas"] == 2
        assert weights["served_bytes"] - whole == weights["delta_bytes"] < 0.1 * whole
        ben.adopt(2)
        assert place.status()["weights"]["served_bytes"] - weights["served_bytes"] == whole
        place.publish(3)
        anna.adopt(3)
        ben.adopt(3)
        assert place.status()["weights"]["served_bytes"] - weights["served_bytes"] < 1.1 * whole


def test_an_actor_that_missed_versions_gets_all_the_deltas_since(fleet: Callable[..., Fleet]) -> None:
    place = fleet()
    anna = Actor(place, "anna")
    with actors(anna):
        place.publish(0)
        anna.adopt(0)
        whole = place.status()["weights"]["served_bytes"]
        for content in (1, 2, 3):
            place.publish(content)
        until(lambda: anna.look() and anna.serving[0] == place.learner.fence)
        assert anna.words == words(3).tobytes()
        assert place.status()["weights"]["served_bytes"] < 1.3 * whole


def test_the_same_weights_under_a_new_fence_are_not_sent_again(fleet: Callable[..., Fleet]) -> None:
    place = fleet()
    anna = Actor(place, "anna")
    with actors(anna):
        place.publish(0)
        anna.adopt(0)
        before = place.status()["weights"]["served_bytes"]
        place.publish(0)
        anna.adopt(0)
        assert anna.serving == (place.learner.fence, 0)
        assert place.status()["weights"]["served_bytes"] == before


def test_where_deltas_are_off_every_set_travels_whole(fleet: Callable[..., Fleet]) -> None:
    off = WeightsConfig(transport="chunks", delta=False)
    place = fleet(off, off)
    anna = Actor(place, "anna", off)
    with actors(anna):
        for content in (0, 1):
            place.publish(content)
            anna.adopt(content)
        weights = place.status()["weights"]
        # A chunk that is late is requested again, and served again.
        assert weights["deltas"] == 0 and weights["served_bytes"] >= 2 * (2 * SIZE + 4)


@sealed
def test_on_one_host_the_hub_sends_nothing_and_remote_actors_get_deltas_still(fleet: Callable[..., Fleet]) -> None:
    auto = WeightsConfig()
    place = fleet(auto, auto)
    anna, remote = Actor(place, "anna", WeightsConfig(transport="shared")), Actor(place, "remote")
    with actors(anna, remote):
        place.publish(0)
        anna.adopt(0)
        assert place.status()["weights"]["served_bytes"] == 0
        assert place.status()["weights"]["sets_mapped"] == 1
        remote.adopt(0)
        for content in (1, 2):
            place.publish(content)
            anna.adopt(content)
            remote.adopt(content)
        weights = place.status()["weights"]
        # The learner was told of the remote actor when it published content 1, so content 2 comes with a delta.
        assert weights["deltas"] == 1 and weights["sets_mapped"] == 3
        assert weights["served_bytes"] == 2 * (2 * SIZE + 4) + weights["delta_bytes"]


@sealed
def test_who_insists_on_shared_memory_is_told_when_there_is_none(fleet: Callable[..., Fleet]) -> None:
    place = fleet(WeightsConfig(transport="shared"), CHUNKS)
    with pytest.raises(RefusedError, match=r"the learner's memory cannot be mapped here, and weights\.transport is 'shared'"):
        place.publish(0)


@sealed
def test_an_actor_that_cannot_map_what_it_is_offered_fetches_chunks_or_says_why(fleet: Callable[..., Fleet]) -> None:
    class Elsewhere(Actor):
        """Its machine has no process of that number."""

        def look(self) -> bool:
            fetching = self.client._weight_receiver
            honest = fetching._begin

            def begin(manifest: wire.Manifest) -> None:
                place = manifest.place and manifest.place.model_copy(update={"pid": 1 << 30})
                honest(manifest.model_copy(update={"place": place}))

            fetching._begin = begin  # type: ignore[method-assign]
            try:
                return super().look()
            finally:
                fetching._begin = honest  # type: ignore[method-assign]

    place = fleet(WeightsConfig(), WeightsConfig())
    place.publish(0)
    anna, strict = Elsewhere(place, "anna", WeightsConfig()), Elsewhere(place, "strict", WeightsConfig(transport="shared"))
    with actors(anna, strict):
        anna.adopt(0)
        assert place.status()["weights"]["served_bytes"] == 2 * SIZE + 4
        with pytest.raises(ConfigError, match=r"the hub's memory cannot be mapped here, and weights\.transport is 'shared'"):
            until(strict.look)


def test_an_actor_that_does_not_adopt_in_its_time_is_dropped_and_comes_back(fleet: Callable[..., Fleet]) -> None:
    place = fleet(WeightsConfig(transport="chunks", adopt_timeout_s=5.0))
    anna, stubborn = Actor(place, "anna"), Actor(place, "stubborn")
    with actors(anna, stubborn):
        place.publish(0)
        anna.adopt(0)

        def dropped() -> int:
            anna.look()
            stubborn.client.poll(ActorState(0, 0, -1, ()), wire.Telemetry(), timeout_s=0.02)  # beats, and never adopts
            return int(place.status()["weights"]["dropped_actors"])

        until(dropped)
        assert "anna" in place.status()["actors"]
        stubborn.adopt(0)
        until(lambda: stubborn.look() or place.status()["actors"].get("stubborn", {}).get("version") == 0)


def test_an_unfinished_fetch_goes_on_where_it_was_after_the_connection_was_lost(fleet: Callable[..., Fleet]) -> None:
    place = fleet()
    place.publish(0)
    anna = Actor(place, "anna")
    fetching = anna.client._weight_receiver
    with actors(anna):
        until(lambda: anna.look() or (fetching._assembly is not None and len(fetching._assembly.missing) < 3))
        if not anna.words:
            fetching.reset()  # what a new Hello does
            anna.client._said_hello = False
        until(lambda: anna.look() or anna.words)
        assert anna.words == words(0).tobytes()


LEARNER = """
import os, sys
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.tensors import RawTensor
client = LearnerClient(sys.argv[1], timeout_s=30)
client.register(0, 0)
connection = client._weight_connection
honest = connection.ask
def ask(message, **options):
    if message.type == "check":
        print("published half", flush=True)
        sys.stdin.read()
    return honest(message, **options)
connection.ask = ask
client.publish(0, {"w": RawTensor("uint8", (1 << 20,), bytes(1 << 20))})
"""


@sealed
def test_a_learner_killed_while_it_publishes_leaves_nothing_behind(fleet: Callable[..., Fleet]) -> None:
    place = fleet(WeightsConfig(), WeightsConfig())
    before = _mapped()
    for _ in range(3):
        killed = subprocess.Popen(
            [sys.executable, "-c", LEARNER, place.address], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert killed.stdout is not None and killed.stdout.readline() == b"published half\n"
        finally:
            killed.kill()
            killed.communicate()
    assert place.status()["version"] is None, "nobody hears of half a set"
    place.publish(1)
    anna = Actor(place, "anna", WeightsConfig())
    with actors(anna):
        anna.adopt(1)
    assert _mapped() - before <= 2, "the newest set, as the learner and the hub of this process map it"
    assert not [name for name in os.listdir("/dev/shm") if "async-rlhf" in name]


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("async-rlhf-weights")


def test_a_learner_that_says_twice_the_same_is_answered_and_believed_once(fleet: Callable[..., Fleet]) -> None:
    place = fleet()
    place.learner.register(0, 0)
    raw, fence = place.learner._connection, place.learner.fence
    weights = WeightSet.of(fence, 0, tensors(0))

    def ask(message: wire.Message, arrays: list[bytes] | None = None) -> wire.Message:
        return raw.ask(message, arrays, timeout_s=DEADLINE_S)[0]

    wanted = wire.Wanted(chunks=True, delta=False, delta_next=True)
    for index in (0, 0, 2, 1, 2):
        assert ask(weights.announcement()) == wanted
        chunk = wire.Chunk(fence=fence, version=0, index=index)
        assert ask(chunk, [bytes(weights.chunk(index))]) == wire.Done()
        assert ask(wire.Check(fence=fence, version=0)) == wire.Checked(done=False)
    last = wire.Chunk(fence=fence, version=0, index=3), [bytes(weights.chunk(3))]
    assert ask(*last) == ask(*last) == ask(weights.announcement()) == wire.Done()
    assert ask(wire.Check(fence=fence, version=0)) == wire.Checked(done=True)
    assert place.status()["weights"]["sets"] == 1


def test_a_delta_that_is_not_of_the_announced_set_is_refused(fleet: Callable[..., Fleet]) -> None:
    place = fleet()
    place.learner.register(0, 0)
    weights = WeightSet.of(place.learner.fence, 0, tensors(0))
    for spec in (
        wire.DeltaSpec(base="0", result="1", num_bytes=8),
        wire.DeltaSpec(base="0", result=weights.digest, num_bytes=len(weights.blob)),
    ):
        with pytest.raises(RefusedError, match="is none of this set"):
            place.learner._connection.ask(weights.announcement().model_copy(update={"delta": spec}), timeout_s=DEADLINE_S)
