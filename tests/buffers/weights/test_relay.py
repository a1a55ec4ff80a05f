"""Actors behind a relay: the hub sends each set once, whoever is killed, and everything else goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from async_rlhf.buffers.clients.actor import ActorState
from async_rlhf.buffers.clients.connection import Connection
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.transport.link import SocketLink
from async_rlhf.buffers.weights.relay import Relay
from async_rlhf.buffers.weights.shared import HAS_SEALS
from tests.buffers.weights.fleet import CHUNKS, DEADLINE_S, SIZE, Actor, Fleet, actors, until, words

WHOLE = 2 * SIZE + 4


class Station:
    """A hub and a relay to it; actors are told the relay's address."""

    def __init__(self, folder: Path, sockets: Path, weights: WeightsConfig) -> None:
        self.folder, self._sockets, self._weights = folder, sockets, weights
        self.fleet = Fleet(folder, f"ipc://{sockets}/hub", CHUNKS, CHUNKS)
        self.address = f"ipc://{sockets}/relay"
        self._pool = ThreadPoolExecutor(4)
        self._relays: list[tuple[Relay, Future[None]]] = []
        self.begin()

    def begin(self, behind: str | None = None, address: str | None = None) -> None:
        relay = Relay(behind or self.fleet.address, address or self.address, self._weights)
        self._relays.append((relay, self._pool.submit(relay.run)))

    def end(self) -> None:
        """The relay that began last ends, and everything it knew."""
        relay, running = self._relays.pop()
        relay.stop()
        running.result(DEADLINE_S)

    def close(self) -> None:
        while self._relays:
            self.end()
        self.fleet.close()
        self._pool.shutdown()

    @property
    def served_bytes(self) -> int:
        return int(self.fleet.status()["weights"]["served_bytes"])


@pytest.fixture
def station(tmp_path: Path, socket_dir: Path) -> Iterator[Callable[..., Station]]:
    made: list[Station] = []

    def make(weights: WeightsConfig = CHUNKS) -> Station:
        made.append(Station(tmp_path / "run", socket_dir, weights))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_hub_sends_a_set_and_a_delta_once_however_many_actors_adopt_them(station: Callable[..., Station]) -> None:
    place = station()
    crew = [Actor(place, name) for name in ("anna", "ben", "cleo")]
    with actors(*crew):
        place.fleet.publish(0)
        for actor in crew:
            actor.adopt(0)
        assert place.served_bytes == WHOLE
        place.fleet.publish(1)
        for actor in crew:
            actor.adopt(1)
        assert place.served_bytes - WHOLE == place.fleet.status()["weights"]["delta_bytes"] < 0.1 * WHOLE
        late = Actor(place, "late")
        with actors(late):
            late.adopt(1)
        assert place.served_bytes < 1.1 * WHOLE, "a late joiner is served by the relay"
        assert {"anna", "ben", "cleo"} <= set(place.fleet.status()["actors"])


# Memory that cannot be changed any more is Linux's (memfd seals); without it a relay sends chunks, which is tested above.
@pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
def test_actors_on_the_relays_machine_map_its_memory(station: Callable[..., Station]) -> None:
    place = station(WeightsConfig(transport="auto"))
    crew = [Actor(place, name, WeightsConfig(transport="shared")) for name in ("anna", "ben")]
    with actors(*crew):
        for content in (0, 1):
            place.fleet.publish(content)
            for actor in crew:
                actor.adopt(content)
        assert place.served_bytes <= 2 * WHOLE


def test_relays_stand_behind_relays(station: Callable[..., Station]) -> None:
    place = station()
    second = place.address + "2"
    place.begin(behind=place.address, address=second)
    place.address = second
    anna = Actor(place, "anna")
    with actors(anna):
        place.fleet.publish(0)
        anna.adopt(0)
        assert place.served_bytes == WHOLE


def test_a_relay_that_ends_takes_nothing_with_it(station: Callable[..., Station]) -> None:
    place = station()
    anna = Actor(place, "anna")
    with actors(anna):
        place.fleet.publish(0)
        anna.adopt(0)
        place.end()
        place.fleet.publish(1)
        place.begin()
        anna.adopt(1)
        anna.client.put(a_group())
        until(lambda: anna.look() or not anna.client.unacknowledged)


def test_credits_and_puts_go_through_a_relay_and_a_hub_that_is_begun_again(station: Callable[..., Station]) -> None:
    place = station()
    anna = Actor(place, "anna")
    with actors(anna):
        place.fleet.publish(0)
        anna.adopt(0)
        fence = place.fleet.learner.fence
        numbers: list[int] = []

        def credited() -> bool:
            anna.client.poll(ActorState(1, *anna.serving, ()), wire.Telemetry(), timeout_s=0.02)
            numbers.extend(credit.number for credit in anna.client.credits())
            return bool(numbers)

        until(credited)
        assert numbers == [0]
        place.fleet.restart()
        anna.client.put(a_group())
        place.fleet.publish(0)
        until(lambda: anna.look() or (anna.serving[0] > fence and not anna.client.unacknowledged))
        assert anna.words == words(0).tobytes()


def test_only_what_actors_say_is_let_through(station: Callable[..., Station]) -> None:
    place = station()
    with (
        control(place.address, timeout_s=DEADLINE_S) as stranger,
        pytest.raises(RefusedError, match="a relay lets no 'halt' through"),
    ):
        stranger.halt()
    rude = Connection(SocketLink(place.address, "rude"))
    answers: list[wire.Message] = []
    try:
        rude.link.send([b"not a message"])
        until(lambda: (heard := rude.receive(0.02)) is not None and (answers.append(heard[1]) or True))
    finally:
        rude.close()
    assert isinstance(answers[0], wire.Refused) and answers[0].reason == "malformed"
    assert place.fleet.status()["state"] == "running"


def a_group() -> Group:
    ids, logprobs = np.array([1], np.int32), np.zeros(1, np.float32)
    return Group(0, 0, ids, (Rollout(ids, logprobs, (Span(0, 1),), "stop"),), Sampling())
