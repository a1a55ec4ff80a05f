"""Actors behind a relay: the hub sends each set once, whoever is killed, and everything else goes through."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.weights.shared import HAS_SEALS
from tests.buffers.hub.place import DEADLINE_S, a_group, delivered, holds, until
from tests.buffers.weights.fleet import WHOLE, Fleet, Station


@pytest.fixture
def hub(fleet: Callable[..., Fleet]) -> Fleet:
    return fleet()


@pytest.fixture
def relay(hub: Fleet) -> Station:
    made = hub.relay()
    made.begin()
    return made


def test_the_hub_sends_a_set_and_a_delta_once_however_many_actors_adopt_them(hub: Fleet, relay: Station) -> None:
    crew = [hub.member(name, address=relay.address) for name in ("anna", "ben", "cleo")]
    hub.publish(0)
    for actor in crew:
        actor.adopt(0)
    assert hub.weights["served_bytes"] == WHOLE
    hub.publish(1)
    for actor in crew:
        actor.adopt(1)
    assert hub.weights["served_bytes"] - WHOLE == hub.weights["delta_bytes"] < 0.1 * WHOLE
    hub.member("late", address=relay.address).adopt(1)
    assert hub.weights["served_bytes"] < 1.1 * WHOLE, "a late joiner is served by the relay"
    assert {"anna", "ben", "cleo"} <= set(hub.status()["actors"])


# Memory that cannot be changed any more is Linux's (memfd seals); without it a relay sends chunks, which is tested above.
@pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
def test_actors_on_the_relays_machine_map_its_memory(hub: Fleet) -> None:
    relay = hub.relay(weights=WeightsConfig(transport="auto"))
    relay.begin()
    shared = WeightsConfig(transport="shared")
    crew = [hub.member(name, shared, address=relay.address) for name in ("anna", "ben")]
    for content in (0, 1):
        hub.publish(content)
        for actor in crew:
            actor.adopt(content)
    assert hub.weights["served_bytes"] <= 2 * WHOLE


def test_relays_stand_behind_relays(hub: Fleet, relay: Station) -> None:
    second = hub.relay("second", hub=relay.address)
    second.begin()
    anna = hub.member("anna", address=second.address)
    hub.publish(0)
    anna.adopt(0)
    assert hub.weights["served_bytes"] == WHOLE


def test_a_relay_that_ends_takes_nothing_with_it(hub: Fleet, relay: Station) -> None:
    anna = hub.member("anna", address=relay.address)
    hub.publish(0)
    anna.adopt(0)
    relay.end()
    hub.publish(1)
    relay.begin()
    anna.adopt(1)
    anna.client.put(a_group(0, 0, 0, "anna"))
    until(delivered(anna), anna)


def test_credits_and_puts_go_through_a_relay_and_a_hub_that_is_begun_again(hub: Fleet, relay: Station) -> None:
    anna = hub.member("anna", address=relay.address)
    hub.publish(0)
    anna.adopt(0)
    fence, anna.capacity = hub.source.fence, 1
    until(holds(anna, 0), anna)
    hub.restart()
    anna.put(0)
    hub.publish(0)
    until(lambda: anna.fence > fence and not anna.client.unacknowledged, anna)
    anna.check(0)


def test_only_what_actors_say_is_let_through(hub: Fleet, relay: Station) -> None:
    with (
        control(relay.address, timeout_s=DEADLINE_S) as stranger,
        pytest.raises(RefusedError, match="a relay forwards no 'halt'"),
    ):
        stranger.halt()
    rude = hub.stranger("rude", address=relay.address)
    answers: list[wire.Message] = []
    rude.link.send([b"not a message"])
    until(lambda: (heard := rude.receive(0.02)) is not None and (answers.append(heard[1]) or True))
    assert isinstance(answers[0], wire.Refused) and answers[0].reason == "malformed"
    assert hub.status()["state"] == "running"
