"""Who is let in at a listening socket, over real ones: a keyed hub knows its peers, and a keyed peer its hub."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.clients.control import Control, control
from async_rlhf.buffers.errors import ConfigError, DeadlineError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport import keys, link
from async_rlhf.buffers.transport.server import ServerSocket
from tests.buffers.hub.place import DEADLINE_S, Actor, Place, until
from tests.conftest import kept_port

COUNTERS = ("connections", "connections_ended", "handshakes_failed", "refused_handshakes")


class Served:
    """A hub, and questions to it over one connection with a listed key, so that none of them is counted as an end."""

    def __init__(self, place: Place, asked: Control) -> None:
        self.place, self.address, self.asked = place, place.address, asked

    def counters(self) -> dict[str, int]:
        status = self.asked.status()
        return {name: status[name] for name in COUNTERS}

    def counted(self, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """The counters once they say enough: what the monitor saw comes by another way than the messages."""
        until(lambda: enough(self.counters()))
        return self.counters()

    def peer(self, key_directory: Path, name: str) -> Actor:
        """An actor that the hub has let in."""
        actor = self.place.actor(name, connect=link.connector(key_directory))
        until(lambda: actor.client._welcome, actor)
        return actor

    def saw_an_end(self, before: dict[str, int]) -> None:
        """A connection ended since `before`."""
        self.counted(lambda now: now["connections_ended"] > before["connections_ended"])


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys", ["far"], link.new_pair)
    return tmp_path / "keys"


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """Keys of another run."""
    keys.create(tmp_path / "strangers", [], link.new_pair)
    return tmp_path / "strangers"


@pytest.fixture
def serve(place: Callable[..., Place], stack: ExitStack) -> Callable[[Path | None], Served]:
    def start(key_directory: Path | None) -> Served:
        address = f"tcp://127.0.0.1:{stack.enter_context(kept_port())}"
        hub = place(Bound(4, 1, 64), address, keys=key_directory, max_frame_bytes=1 << 20)
        return Served(hub, stack.enter_context(hub.control()))

    return start


@pytest.fixture
def served(serve: Callable[[Path | None], Served], key_directory: Path) -> Served:
    return serve(key_directory)


def refused(address: str, connect: link.Connect) -> str:
    """What an operator reads who tries to come in so."""
    with pytest.raises(DeadlineError) as error, control(address, 20.0, connect) as asked:
        asked.status()
    return str(error.value)


def mixed(public: Path, secret: Path) -> link.Connect:
    """Expects the hub of the one directory, and has the secret of the other."""
    known = keys.PeerKeys(keys.load_peer(public).hub_public, keys.load_peer(secret).secret)
    return lambda address, name: link.SocketLink(address, name, keys=known)


def test_a_machine_is_let_in_and_cut_off_meanwhile(
    served: Served, key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others stay connected, with the keys that they have; a list that cannot be read still cuts whose entry is gone."""

    def reread(text: str) -> None:
        served.counted(lambda now: text in caplog.text)
        caplog.clear()

    with caplog.at_level(logging.INFO, "async_rlhf.buffers.transport.server"):
        far = served.peer(key_directory / "for-far", "far-0")
        keys.add(key_directory, ["near", "third"], link.new_pair)
        reread("4 are let in")
        near = served.peer(key_directory / "for-near", "near-0")
        third = link.connector(key_directory / "for-third")
        assert far.client.stop_reason is None and near.client.stop_reason is None

        before = served.counters()
        revoked = link.connector(key_directory / "for-far")
        keys.revoke(key_directory, ["far"])
        reread("3 are let in")
        served.saw_an_end(before)
        assert "not allowed" in refused(served.address, revoked)
        with pytest.raises(ConfigError, match=r"'far' is no machine that .* lets in"):
            keys.revoke(key_directory, ["far"])
        with pytest.raises(ConfigError, match="'local' is no machine"):
            keys.revoke(key_directory, ["local"])

        before = served.counters()
        (key_directory / "allowed" / "broken.public").write_text("no key\n")
        (key_directory / "allowed" / "near.public").unlink()
        reread("2 are let in")
        served.saw_an_end(before)
        (key_directory / "allowed" / "broken.public").unlink()
        with pytest.raises(RefusedError, match="allowed as actor"), control(served.address, 60.0, third) as asked:
            asked.status()


def test_a_key_that_is_not_on_the_list_is_refused_counted_and_logged(
    served: Served, key_directory: Path, strangers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "async_rlhf.buffers.hub.hub"):
        said = refused(served.address, mixed(key_directory, strangers))
        counters = served.counted(lambda now: now["handshakes_failed"] > 0)
        served.counted(lambda now: "refused" in caplog.text)
    assert "the handshake failed" in said and "not allowed" in said
    assert counters["refused_handshakes"] == counters["handshakes_failed"] == 1
    assert "127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    ("who", "keyed", "words"),
    [
        ("a peer without keys", True, "that hub needs keys"),
        ("a peer that expects another hub", True, "hub.public in security.keys is not the key of that hub"),
        ("a peer with keys", False, "that hub has no keys"),
    ],
)
def test_hub_and_peer_do_not_speak_where_one_lacks_what_the_other_expects(
    serve: Callable[[Path | None], Served], key_directory: Path, strangers: Path, who: str, keyed: bool, words: str
) -> None:
    peers: dict[str, link.Connect] = {
        "a peer without keys": link.SocketLink,
        "a peer that expects another hub": mixed(strangers, key_directory),
        "a peer with keys": link.connector(key_directory),
    }
    served = serve(key_directory if keyed else None)
    assert words in refused(served.address, peers[who])
    assert served.counted(lambda now: now["handshakes_failed"] > 0)["refused_handshakes"] == 0


def test_a_peer_that_sends_too_much_is_cut_and_the_hub_goes_on(served: Served) -> None:
    loud = served.place.stranger("loud")
    loud.ask(wire.GetStatus(), timeout_s=DEADLINE_S)
    before = served.counters()
    loud.link.send([bytes(3 << 20)])
    served.saw_an_end(before)


def test_a_stranger_who_speaks_no_zeromq_is_cut_and_counted(served: Served) -> None:
    host, port = served.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        before = served.counters()
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        served.saw_an_end(before)


SOMEBODY = keys.KeyHolder("somebody", frozenset({"actor"}))
frame = st.binary(max_size=40)


@given(st.lists(frame, max_size=9))
def test_whatever_asks_to_be_let_in_gets_a_refusal_of_the_right_form(request: list[bytes]) -> None:
    answer, who = keys.admit(request, {bytes(32): SOMEBODY})
    assert len(answer) == 6 and answer[2] == b"400" and who


def test_only_curve_with_an_allowed_key_in_our_domain_is_let_in() -> None:
    key, allowed = bytes(range(32)), {bytes(range(32)): SOMEBODY}
    good = [b"1.0", b"7", keys.ZAP_DOMAIN, b"10.0.0.9", b"", b"CURVE", key]
    assert keys.admit(good, allowed) == ([b"1.0", b"7", b"200", b"OK", key.hex().encode(), b""], "")
    for place, wrong in [(0, b"2.0"), (2, b"other"), (5, b"NULL"), (5, b"PLAIN"), (6, bytes(32)), (6, b"")]:
        asked = [*good[:place], wrong, *good[place + 1 :]]
        assert keys.admit(asked, allowed)[0][2] == b"400"
    assert keys.admit([*good, b"more"], allowed) == ([b"1.0", b"7", b"400", b"not allowed", b"", b""], "10.0.0.9")


def test_key_files_hold_what_zeromq_makes_and_a_secret_is_only_its_owners(key_directory: Path) -> None:
    for own in (key_directory, key_directory / "for-far"):
        peer = keys.load_peer(own)
        allowed = keys.load_hub(key_directory).allowed
        assert keys._bytes(zmq.curve_public(peer.secret)) in allowed
        assert peer.hub_public == zmq.curve_public(keys.load_hub(key_directory).secret)
    assert {holder.name: holder.roles for holder in allowed.values()} == {"far": {"actor"}, "local": set(keys.ROLES)}
    for secret in key_directory.rglob("*.secret"):
        assert secret.stat().st_mode & 0o777 == 0o600


def test_no_secret_is_shown_in_a_text(key_directory: Path) -> None:
    hub, peer = keys.load_hub(key_directory), keys.load_peer(key_directory)
    for secret in (hub.secret, peer.secret):
        assert secret.decode() not in f"{hub!r} {peer!r} {hub} {peer}"


SPOILT: list[tuple[str, int | str | None, str]] = [
    ("hub.secret", None, "hub.secret' cannot be read"),
    ("hub.public", None, "hub.public' cannot be read"),
    ("peer.secret", None, "peer.secret' cannot be read"),
    ("allowed/*", None, "refuse every peer"),
    ("hub.secret", 0o640, "can be read by others"),
    ("peer.secret", 0o604, "can be read by others"),
    ("hub.public", 0o666, "can be changed by others"),
    ("allowed", 0o777, "can be changed by others"),
    ("allowed/local.public", 0o664, "can be changed by others"),
    ("hub.secret", "short", "is damaged"),
    ("peer.secret", "#" * 40, "is damaged"),  # beyond 32 bits
    ("allowed/far.public", '"' * 40, "is damaged"),
    ("hub.public", "é" * 20, "is damaged"),
    ("hub.public", "0" * 40 + "\nactor", "is damaged"),
    ("allowed/far.public", "FAR\n\n", "far.public: roles = none; give one or more of actor, relay, learner, control"),
    ("allowed/far.public", "FAR\nactor king\n", "far.public: roles = actor king; give one or more of"),
    ("allowed/far-2.public", "FAR\nactor\n", "one key stands in two files"),
]


@pytest.mark.parametrize(("name", "change", "message"), SPOILT)
def test_a_key_directory_that_is_incomplete_open_or_damaged_is_refused(
    key_directory: Path, name: str, change: int | str | None, message: str
) -> None:
    """A file is removed, or has another mode, or another text, in which FAR is the public key of the machine."""
    key = (key_directory / "allowed" / "far.public").read_text().split()[0]
    for path in [*key_directory.glob(name)] or [key_directory / name]:
        match change:
            case None:
                path.unlink()
            case int():
                path.chmod(change)
            case _:
                path.write_text(change.replace("FAR", key))
    with pytest.raises(ConfigError, match=message):
        keys.load_hub(key_directory)
        keys.load_peer(key_directory)


def test_keys_are_never_written_over(key_directory: Path) -> None:
    before = {path: path.read_bytes() for path in key_directory.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="never written over"):
        keys.create(key_directory, [], link.new_pair)
    assert before == {path: path.read_bytes() for path in key_directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("names", [["local"], ["a", "a"], ["../a"], [".a"], ["a/b"], [""], ["a", "a-b"], ["local-1"]])
def test_a_machine_needs_a_name_of_its_own_that_is_no_path_and_no_actor_of_anothers(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ConfigError, match="name"):
        keys.create(tmp_path / "keys", names, link.new_pair)
    assert not (tmp_path / "keys").exists()


def test_a_wide_open_umask_opens_no_secret(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys.create(tmp_path / "keys", ["far"], link.new_pair)
    finally:
        os.umask(before)
    keys.load_hub(tmp_path / "keys")
    keys.load_peer(tmp_path / "keys" / "for-far")


def make(address: str) -> ServerSocket:
    return ServerSocket(address, max_part_bytes=1000, max_message_bytes=2000, max_unread=10)


def test_a_wake_after_the_end_writes_into_nothing_that_has_the_place_of_its_pipe(socket_dir: Path) -> None:
    server = make(f"ipc://{socket_dir}/server")
    server.close()
    readable, writable = os.pipe()  # most likely the numbers that were just given back
    try:
        os.set_blocking(readable, False)
        server.wake()
        with pytest.raises(BlockingIOError):
            os.read(readable, 1)
    finally:
        os.close(readable)
        os.close(writable)


def test_an_address_that_is_taken_is_refused_and_leaves_nothing_open(socket_dir: Path) -> None:
    address = f"tcp://127.0.0.1:{make_port(first := make('tcp://127.0.0.1:*'))}"
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(zmq.ZMQError):
        make(address)
    after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    first.close()
    assert len(after) == len(before)


def make_port(server: ServerSocket) -> str:
    return server.address.rpartition(":")[2]
