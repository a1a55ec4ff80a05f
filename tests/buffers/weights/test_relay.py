"""Actors behind a relay: the hub sends each set once, all else goes through, each side has its own allow-list."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport import keys, link
from async_rlhf.buffers.weights import weight_set
from async_rlhf.buffers.weights.shared import HAS_SEALS
from async_rlhf.buffers.weights.store import Delta, WeightStore
from tests.buffers.hub.place import DEADLINE_S, holds, until
from tests.buffers.weights.fleet import WHOLE, Adopter, Fleet, Station


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


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_set_still_comes_when_its_delta_is_dropped_while_it_is_fetched(
    hub: Fleet, relay: Station, is_relayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub drops the oldest of too many, and a long delta is asked for in parts."""
    monkeypatch.setattr(weight_set, "CHUNK_BYTES", 1024)
    anna = hub.member("anna", address=relay.address if is_relayed else hub.address)
    hub.publish(0)
    anna.adopt(0)
    find, served = WeightStore.delta, itertools.count()

    def dropped(store: WeightStore, result: str) -> Delta:
        if next(served) == 9:  # later than what comes with the manifest
            store._deltas.clear()
        return find(store, result)

    monkeypatch.setattr(WeightStore, "delta", dropped)
    hub.publish(1)
    anna.adopt(1)
    assert next(served) > 10 and hub.status()["refused"]["weights"] > 0


# Memory that cannot be changed any more is Linux's (memfd seals); without it a relay sends chunks, which is tested above.
@pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
def test_actors_on_the_relays_machine_map_its_memory(hub: Fleet) -> None:
    relay = hub.relay(weights=WeightsConfig())
    relay.begin()
    crew = [hub.member(name, WeightsConfig(), address=relay.address) for name in ("anna", "ben")]
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


# -- keys ----------------------------------------------------------------------------------------------------------------


@dataclass
class Site:
    """A hub at `home`, and a relay to it with its own key from there and a list of its own at `away`."""

    hub: Fleet
    relay: Station
    home: Path
    away: Path

    def member(self, name: str, own: Path) -> Adopter:
        """An actor behind the relay, with these keys."""
        return self.hub.member(name, address=self.relay.address, connect=link.connector(own))

    def refuses(self, own: Path) -> str:
        """What an actor with these keys ends with."""
        stranger = self.member("stranger", own)
        with pytest.raises(DeadlineError) as error:
            until(lambda: False, stranger)
        return str(error.value)


@pytest.fixture
def site(tmp_path: Path, fleet: Callable[..., Fleet]) -> Site:
    home, away = tmp_path / "home", tmp_path / "site"
    keys.create(home, ["site:relay"], link.new_pair)
    keys.create(away, ["near"], link.new_pair)
    hub = fleet(keys=home)
    return Site(hub, hub.relay(keys=away), home, away)


def strangers(folder: Path, known: Path) -> Path:
    """Keys of another run, which expect this hub."""
    keys.create(folder / "strangers", [], link.new_pair)
    (folder / "strangers" / "hub.public").write_bytes((known / "hub.public").read_bytes())
    return folder / "strangers"


def test_an_actor_on_the_relays_list_adopts_through_it(site: Site) -> None:
    site.relay.begin(site.home / "for-site")
    near, here = site.member("near-0", site.away / "for-near"), site.member("here", site.away)
    site.hub.publish(0)
    near.adopt(0)
    here.adopt(0)
    assert {"near-0", "here"} <= set(site.hub.status()["actors"])


def test_who_is_not_on_the_relays_list_is_refused_there(site: Site, tmp_path: Path) -> None:
    site.relay.begin(site.home / "for-site")
    assert "this key is not allowed" in site.refuses(strangers(tmp_path, site.away))
    assert "is not the key of that hub" in site.refuses(site.home / "for-site")  # of the hub's own list: it is another one's
    assert not site.hub.status()["actors"]


def test_an_actor_that_says_it_is_another_machines_is_refused_at_the_relay(site: Site) -> None:
    site.relay.begin(site.home / "for-site")
    thief = site.member("far-0", site.away / "for-near")
    with pytest.raises(RefusedError, match="role: an actor of 'near' is called near or near-"):
        until(lambda: False, thief)
    assert not site.hub.status()["actors"]


def test_what_a_relays_key_is_not_allowed_as_is_refused_at_the_hub_and_told_to_the_actor(site: Site) -> None:
    """The relay speaks with a key that is a machine's of actors, under whose name alone it may join."""
    entry = site.home / "allowed" / "site.public"
    entry.write_text(entry.read_text().replace("relay", "actor"))
    site.hub.restart()
    site.relay.begin(site.home / "for-site")
    near = site.member("near-0", site.away / "for-near")
    with pytest.raises(RefusedError, match="role: an actor of 'site' is called site or site-"):
        until(lambda: False, near)
    assert site.hub.status()["refused"]["role"] == 1


def test_a_relay_whose_key_the_hub_does_not_let_in_ends_and_says_why(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"the handshake failed: .*/hub: this key is not allowed"):
        site.relay.begin(strangers(tmp_path, site.home)).result(DEADLINE_S)
    until(lambda: site.hub.status()["refused_handshakes"] == 1)
