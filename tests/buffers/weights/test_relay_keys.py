"""A relay between a hub with keys and actors with keys: each side has an allow-list of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.transport import keys, link
from tests.buffers.hub.place import DEADLINE_S, until
from tests.buffers.weights.fleet import Adopter, Fleet, Station


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


def test_a_relay_that_expects_another_hub_ends_and_says_why(site: Site) -> None:
    with pytest.raises(DeadlineError, match="is not the key of that hub"):
        site.relay.begin(site.away).result(DEADLINE_S)
