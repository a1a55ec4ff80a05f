"""An environment that a server plays, over real sockets: what a run sees of it, and what becomes of it when one end is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rlhf.actors.environments import EnvironmentConfig, remote
from async_rlhf.actors.environments.server import EnvironmentServer
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.actors.workers import client
from async_rlhf.actors.workers.messages import (
    Describe,
    Leave,
    MissingSteps,
    SessionBeat,
    SessionGone,
    SessionRefused,
    SessionStep,
    Stepped,
)
from async_rlhf.buffers.errors import ConfigError
from tests.actors.environments.played import Bench
from tests.actors.served import Peer, running
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


class Server:
    """Starts and ends it, at one address."""

    def __init__(self, directory: Path, source: str = ENVIRONMENTS, name: str = "echo") -> None:
        (directory / "echoes.py").write_text(source)
        self._config = EnvironmentConfig(function=f"{directory / 'echoes.py'}:{name}")
        self._directory, self._made, self.address = directory, ExitStack(), "tcp://127.0.0.1:*"

    def start(self, **more: Any) -> EnvironmentServer:
        spec = self._config.spec(self._directory)
        assert spec is not None
        server = EnvironmentServer(spec, self._config, self.address, **more)
        self._made.enter_context(running(server))
        self.address = server.address
        return server

    def stop(self) -> None:
        self._made.close()
        wait_for(partial(_is_free, self.address), "the address is free")


def _is_free(address: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        try:
            socket.bind(address)
        except zmq.ZMQError:
            return False
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made._made.close()


@pytest.fixture
def bench(tmp_path: Path, server: Server) -> Iterator[Callable[..., Bench]]:
    """Plays as an actor does."""
    with ExitStack() as made:
        yield lambda **settings: made.enter_context(Bench(tmp_path, f"remote:{server.address}", **settings))


def fields(path: Path | None = None) -> dict[str, Any]:
    return {"question": "?", "answer": "4", "path": "" if path is None else str(path)}


def test_a_served_environment_is_as_it_would_be_in_the_actor(
    server: Server, bench: Callable[..., Bench], tmp_path: Path
) -> None:
    server.start()
    there = bench()
    with Bench(tmp_path / "echoes.py", "echo") as here:
        for texts in (("a", "stop"), ("bb", "c", "return"), ("raise",), ("a", "b", "c")):
            other, own = there.play(*texts), here.play(*texts)
            assert (other[:-1], other[-1].score, other[-1].reason) == (own[:-1], own[-1].score, own[-1].reason)
            scores = [[each.score for each in bench.events[len(bench.events) - 1][:-1]] for bench in (there, here)]
            assert scores[0] == scores[1]
    limited = bench(max_turns=1)
    assert (limited.play("a")[-1].reason, limited.play("stop")[-1].reason) == ("max_turns", "scored")


def test_what_a_run_must_know_of_it_is_requested_from_the_server(server: Server, tmp_path: Path) -> None:
    server.start()
    config = EnvironmentConfig(function=f"remote:{server.address}")
    spec = config.spec(tmp_path)
    assert spec is not None
    assert (spec.name, spec.max_turns, spec.at_limit, spec.required) == ("echo", 3, None, ("question", "answer", "path"))
    with pytest.raises(ConfigError, match="environment 'echo' asks for 'answer', which is neither"):
        spec.check({"question", "path"})
    with pytest.raises(
        ConfigError, match=r"environment.options.depth: a remote environment takes keys; others are its server's"
    ):
        EnvironmentConfig(function=config.function, options={"depth": 2}).spec(tmp_path)


def test_a_server_that_is_not_there_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_DESCRIBE_S", 0.2)
    with pytest.raises(ConfigError, match=r"no environment answers at ipc://.*within 0.2 s, without keys.*serve environment"):
        EnvironmentConfig(function=f"remote:ipc://{tmp_path}/none").spec(tmp_path)
    with pytest.raises(ConfigError, match="is no address"):
        EnvironmentConfig(function="remote:nowhere:1").spec(tmp_path)


def test_a_turn_that_comes_twice_is_played_once_and_one_that_cannot_follow_is_refused(server: Server) -> None:
    started = server.start()
    first, second = SessionStep(id=7, members=[fields()]), SessionStep(id=7, turn=1, text="a")
    with Peer(server.address) as peer:
        for step, answer in (
            (first, Stepped(id=7, turn=0, content="?")),
            (second, Stepped(id=7, turn=1, content="a!", score=1.0)),
        ):
            peer.send(step, step)
            assert peer.receive() == answer
            for again in (step, SessionBeat(open=[(7, step.turn)])):
                peer.send(again)
                assert peer.receive() == answer
            assert peer.receive() == MissingSteps(ids=[])
        for wrong in (SessionStep(id=7, turn=5, text="a"), SessionStep(id=7, turn=2), SessionStep(id=8)):
            peer.send(wrong)
            assert isinstance(peer.receive(), SessionRefused)
        peer.send(SessionStep(id=9, turn=1, text="a"), SessionBeat(open=[(7, 2), (9, -1)]))
        assert [peer.receive(), peer.receive()] == [SessionGone(id=9), MissingSteps(ids=[7, 9])]
    assert started.counters == {"requested": 2, "answered": 2, "refused": 3}


def test_an_episode_of_a_server_that_began_anew_is_begun_again_once(
    server: Server, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_UNANSWERED_BEAT_S", 0.5)
    with kept_port() as port:
        server.address = f"tcp://127.0.0.1:{port}"
        server.start()
        played = bench()
        played.begin("one", path="")
        played.until(played.heard(1))
        for heard in (3, 4):
            server.stop()
            server.start()
            if heard == 3:
                played.pool.reply("one", "a")
            played.until(played.heard(heard))  # the second time while it is the model's turn
    assert [type(event) for event in played.events["one"]] == [Read, type(None), Read, EpisodeEnd]
    assert "began anew" in played.failure("one")


def test_an_episode_that_is_left_or_forgotten_or_whose_client_is_silent_is_closed(server: Server, tmp_path: Path) -> None:
    now = [0.0]
    started = server.start(clock=lambda: now[0])
    with Peer(server.address) as peer:
        for number, gone in enumerate((Leave(ids=[0]), SessionBeat(open=[]), None)):
            path = tmp_path / f"{number}"
            peer.send(SessionStep(id=number, members=[fields(path)]))
            peer.receive()
            assert not path.exists() and started.num_sessions == 1
            peer.send(SessionBeat(open=[(number, -1)]))
            assert peer.receive() == MissingSteps(ids=[])
            if gone is None:
                now[0] = 3600.0
            else:
                peer.send(gone)
            wait_for(path.exists, "the generator is closed")
            if isinstance(gone, SessionBeat):
                peer.receive()
        peer.send(Describe(), SessionStep(id=2, turn=1, text="a"))
        peer.receive()
        assert peer.receive() == SessionGone(id=2)
