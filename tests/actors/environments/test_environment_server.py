"""An environment that a server plays, over real sockets: what a run sees of it, and what becomes of it when one end is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rlhf.actors.environments import EnvironmentConfig, remote
from async_rlhf.actors.environments.pool import Ended, Lost, Observation
from async_rlhf.actors.environments.remote import PLAYED, Beat, Describe, Gone, Leave, Message, Step, Stepped
from async_rlhf.actors.environments.server import EnvironmentServer
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.link import new_pair
from tests.actors.environments.played import COLUMNS, Bench
from tests.conftest import kept_port, wait_for

ENVIRONMENTS = """
from async_rlhf import Feedback, Score, environment

@environment(max_turns=3, timeout_s=20, at_limit=None)
def echo(question, answer, path):
    try:
        text = yield question
        while text != "stop":
            if text == "raise": raise ValueError("no")
            if text == "return": return
            text = yield Feedback(text + "!", score=len(text))
        yield Score(1.0, metrics={"right": float(answer)})
    finally:
        if path: open(path, "a").write("closed ")
"""
Serve = Callable[..., EnvironmentServer]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    (tmp_path / "echoes.py").write_text(ENVIRONMENTS)
    monkeypatch.setattr(remote, "_RESEND_S", 0.5)
    running: list[tuple[EnvironmentServer, threading.Thread]] = []

    def start(address: str = "tcp://127.0.0.1:*", key_dir: Path | None = None, **more: Any) -> EnvironmentServer:
        config = EnvironmentConfig(function=f"{tmp_path / 'echoes.py'}:echo")
        spec = config.spec(tmp_path)
        assert spec is not None
        server = EnvironmentServer(spec, config, address, key_dir, **more)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[EnvironmentServer], Bench]]:
    """Plays as an actor does."""
    with ExitStack() as made:
        yield lambda server: made.enter_context(Bench(tmp_path, f"remote:{server.address}"))


class Peer:
    """A socket of its own, to say what no client of ours says."""

    def __init__(self, server: EnvironmentServer) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(server.address)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy()

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self._socket.send(message if isinstance(message, bytes) else PLAYED.pack(message))

    def hear(self) -> Message:
        assert self._socket.poll(60_000), "nothing was answered"
        return PLAYED.unpack(self._socket.recv())


def fields(path: Path | None = None) -> dict[str, Any]:
    return {"question": "?", "answer": "4", "path": "" if path is None else str(path)}


def test_a_served_environment_is_as_it_would_be_at_home(serve: Serve, bench: Callable[..., Bench], tmp_path: Path) -> None:
    away = bench(serve())
    with Bench(tmp_path / "echoes.py", "echo") as home:
        for texts in (("a", "stop"), ("bb", "c", "return"), ("raise",), ("a", "b", "c")):
            there, here = away.play(*texts), home.play(*texts)
            assert there[:-1] == here[:-1]
            assert there[-1].score == here[-1].score or "ValueError: no" in there[-1].score.failure
            assert (there[-1].reason, [each.score for each in away.events[len(away.events) - 1][:-1]]) == (
                here[-1].reason,
                [each.score for each in home.events[len(home.events) - 1][:-1]],
            )


def test_what_a_run_must_know_of_it_is_asked_of_the_server(serve: Serve, tmp_path: Path) -> None:
    config = EnvironmentConfig(function=f"remote:{serve().address}")
    spec = config.spec(tmp_path, COLUMNS)
    assert spec is not None
    assert (spec.name, spec.max_turns, spec.at_limit, spec.required) == ("echo", 3, None, ("question", "answer", "path"))
    with pytest.raises(ConfigError, match="environment 'echo' asks for 'answer', which is neither"):
        config.spec(tmp_path, {"question", "path"})
    with pytest.raises(
        ConfigError, match=r"environment.options.depth: a remote environment takes keys; others are its server's"
    ):
        EnvironmentConfig(function=config.function, options={"depth": 2}).spec(tmp_path)


def test_a_server_that_is_not_there_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_DESCRIBE_S", 0.2)
    with pytest.raises(ConfigError, match=r"no environment answers at ipc://.*within 0.2 s, without keys.*serve environment"):
        EnvironmentConfig(function=f"remote:ipc://{tmp_path}/none").spec(tmp_path)
    with pytest.raises(ConfigError, match="has no address"):
        EnvironmentConfig(function="remote:nowhere:1").spec(tmp_path)


def test_a_turn_that_is_asked_for_twice_is_played_once(serve: Serve) -> None:
    server = serve()
    first, second = Step(id=7, turn=0, fields=fields(), text=None), Step(id=7, turn=1, fields=None, text="a")
    with Peer(server) as peer:
        peer.say(first, first)
        assert peer.hear() == Stepped(id=7, turn=0, content="?")
        peer.say(first)
        assert peer.hear() == Stepped(id=7, turn=0, content="?")
        peer.say(second)
        answer = peer.hear()
        peer.say(second)
        assert peer.hear() == answer == Stepped(id=7, turn=1, content="a!", score=1.0)
    assert server.counters == {"episodes": 1, "turns": 1, "refused": 0}


def test_an_episode_of_a_server_that_began_anew_is_begun_again_once(serve: Serve, bench: Callable[..., Bench]) -> None:
    with kept_port() as port:
        server = serve(f"tcp://127.0.0.1:{port}")
        played = bench(server)
        played.begin("one", path="")
        played.until(played.heard(1))
        for times in (1, 2):
            server.stop()
            wait_for(partial(_is_free, server.address), "the address is free")
            server = serve(server.address)
            played.pool.reply("one", "a")
            played.until(played.heard(2 * times))
            if times == 1:
                played.until(played.heard(3))
    kinds = [type(event) for event in played.events["one"]]
    assert kinds == [Observation, Lost, Observation, Ended] and "began anew" in played.failure("one")


def _is_free(address: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        try:
            socket.bind(address)
        except zmq.ZMQError:
            return False
    return True


def test_an_episode_that_is_left_or_forgotten_or_whose_client_is_silent_is_closed(serve: Serve, tmp_path: Path) -> None:
    now = [0.0]
    server = serve(clock=lambda: now[0])
    with Peer(server) as peer:
        for number, gone in enumerate((Leave(id=0), Beat(open=[]), None)):
            path = tmp_path / f"{number}"
            peer.say(Step(id=number, turn=0, fields=fields(path), text=None))
            peer.hear()
            assert not path.exists() and server.num_episodes == 1
            peer.say(Beat(open=[number]))
            if gone is None:
                peer.say(Describe())  # answered after the beat was heard
                peer.hear()
                now[0] = 3600.0
            else:
                peer.say(gone)
            wait_for(path.exists, "the generator is closed")
        peer.say(Step(id=2, turn=1, fields=None, text="a"))
        assert peer.hear() == Gone(id=2, turn=1)


def test_rubbish_is_counted_and_the_server_goes_on(serve: Serve) -> None:
    server = serve()
    with Peer(server) as peer:
        peer.say(b"", b"\xc1", PLAYED.pack(Stepped(id=0, turn=0)), Step(id=0, turn=0, fields=None, text=None))
        peer.say(Step(id=1, turn=0, fields=fields(), text=None))
        assert peer.hear() == Stepped(id=1, turn=0, content="?")
        peer.say(Step(id=1, turn=5, fields=None, text="a"), Step(id=1, turn=1, fields=None, text=None))
        peer.say(Step(id=1, turn=1, fields=None, text="stop"))
        right = Score(1.0, metrics={"right": 4.0})
        assert peer.hear() == Stepped(id=1, turn=1, scored=True, value=right.value, metrics=dict(right.metrics))
    assert server.counters["refused"] == 6


def test_with_keys_only_those_on_the_list_are_answered(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.create(tmp_path / "keys", ["friend"], new_pair)
    keys.create(tmp_path / "other", ["stranger"], new_pair)
    server = serve(key_dir=tmp_path / "keys")
    with_keys = {name: {"keys": str(tmp_path / name)} for name in ("keys/for-friend", "other/for-stranger")}
    with Bench(tmp_path, f"remote:{server.address}", options=with_keys["keys/for-friend"]) as friend:
        assert friend.play("stop")[-1].score == Score(1.0, metrics={"right": 4.0})
    monkeypatch.setattr(remote, "_DESCRIBE_S", 0.5)
    for options in ({}, with_keys["other/for-stranger"]):
        with pytest.raises(ConfigError, match="no environment answers"):
            EnvironmentConfig(function=f"remote:{server.address}", options=options).spec(tmp_path)


def test_without_keys_an_environment_is_served_on_this_machine_only(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"served on this machine only.*--keys"):
        serve("tcp://0.0.0.0:*")
    server = serve()
    with pytest.raises(ConfigError, match="cannot be used: Address already in use"):
        serve(server.address)
