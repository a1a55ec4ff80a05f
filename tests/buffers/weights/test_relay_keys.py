"""A relay between a hub with keys and actors with keys: each side has an allow-list of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.transport import keys, link
from async_rlhf.buffers.weights.relay import Relay
from tests.buffers.weights.fleet import CHUNKS, DEADLINE_S, Actor, Fleet, actors, until


class Site:
    """A hub at `home`, and a relay to it with its own key from there and a list of its own at `site`."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.home, self.site = folder / "home", folder / "site"
        keys.create(self.home, ["site:relay"], link.new_pair)
        keys.create(self.site, ["near"], link.new_pair)
        self.fleet = Fleet(folder / "run", f"ipc://{sockets}/hub", CHUNKS, CHUNKS, self.home)
        self.address = f"ipc://{sockets}/relay"
        self._pool, self._closing = ThreadPoolExecutor(1), ExitStack()

    def begin(self, own: Path) -> Future[None]:
        """The relay runs, with this directory to speak to the hub."""
        relay = Relay(self.fleet.address, self.address, CHUNKS, link.connector(own), keys.load_hub(self.site))
        running = self._pool.submit(relay.run)
        self._closing.callback(relay.stop)
        return running

    def close(self) -> None:
        self._closing.close()
        self.fleet.close()
        self._pool.shutdown()


@pytest.fixture
def site(tmp_path: Path, socket_dir: Path) -> Iterator[Site]:
    made = Site(tmp_path, socket_dir)
    yield made
    made.close()


@pytest.fixture
def refused(site: Site) -> Callable[[Path], str]:
    """What an actor with these keys ends with."""

    def ends_with(own: Path) -> str:
        stranger = Actor(site, "stranger", keys=own)
        with actors(stranger), pytest.raises(DeadlineError) as error:
            until(stranger.look)
        return str(error.value)

    return ends_with


def test_an_actor_on_the_relays_list_adopts_through_it(site: Site) -> None:
    site.begin(site.home / "for-site")
    near, here = Actor(site, "near-0", keys=site.site / "for-near"), Actor(site, "here", keys=site.site)
    with actors(near, here):
        site.fleet.publish(0)
        near.adopt(0)
        here.adopt(0)
        assert {"near-0", "here"} <= set(site.fleet.status()["actors"])


def test_who_is_not_on_the_relays_list_is_refused_there(site: Site, refused: Callable[[Path], str], tmp_path: Path) -> None:
    site.begin(site.home / "for-site")
    keys.create(tmp_path / "strangers", [], link.new_pair)
    stranger = tmp_path / "strangers"
    (stranger / "hub.public").write_bytes((site.site / "hub.public").read_bytes())
    assert "this key is not allowed" in refused(stranger)
    assert "is not the key of that hub" in refused(site.home / "for-site")  # of the hub's own list: it is another one's
    assert not site.fleet.status()["actors"]


def test_an_actor_that_says_it_is_another_machines_is_refused_at_the_relay(site: Site) -> None:
    site.begin(site.home / "for-site")
    thief = Actor(site, "far-0", keys=site.site / "for-near")
    with actors(thief), pytest.raises(RefusedError, match="role: an actor of 'near' is called near or near-"):
        until(thief.look)
    assert not site.fleet.status()["actors"]


def test_what_a_relays_key_is_not_allowed_as_is_refused_at_the_hub_and_told_to_the_actor(site: Site) -> None:
    """The relay speaks with a key that is a machine's of actors, under whose name alone it may join."""
    entry = site.home / "allowed" / "site.public"
    entry.write_text(entry.read_text().replace("relay", "actor"))
    site.fleet.restart()
    site.begin(site.home / "for-site")
    near = Actor(site, "near-0", keys=site.site / "for-near")
    with actors(near), pytest.raises(RefusedError, match="role: an actor of 'site' is called site or site-"):
        until(near.look)
    assert site.fleet.status()["refused"]["role"] == 1


def test_a_relay_whose_key_the_hub_does_not_let_in_ends_and_says_why(site: Site, tmp_path: Path) -> None:
    keys.create(tmp_path / "strangers", [], link.new_pair)
    stranger = tmp_path / "strangers"
    (stranger / "hub.public").write_bytes((site.home / "hub.public").read_bytes())
    with pytest.raises(DeadlineError, match=r"the handshake failed: .*/hub: this key is not allowed"):
        site.begin(stranger).result(DEADLINE_S)
    until(lambda: site.fleet.status()["refused_handshakes"] == 1)


def test_a_relay_that_expects_another_hub_ends_and_says_why(site: Site) -> None:
    with pytest.raises(DeadlineError, match="is not the key of that hub"):
        site.begin(site.site).result(DEADLINE_S)
