"""A reward served to others over a real socket: asked through the scoring pool, as a run would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.messages import (
    REWARDS,
    STAGES,
    Heartbeat,
    ScoreRequest,
    ScoreResponse,
    frames_of,
)
from async_rlhf.actors.scoring.server import REWARD_SERVER, ScoringServer
from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.record import Score
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.link import new_pair
from tests.actors.scored import Bench

JUDGES = """
from async_rlhf.actors.rewards import Score

def double(completion, factor=2.0):
    if completion == "wrong": raise ValueError("no number")
    if completion == "none": return None
    if completion == "absurd": return 1e308
    if completion.startswith("half"): raise ValueError(completion)
    return Score(factor * float(completion), metrics={"length": len(completion)})
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ScoringServer]]:
    (tmp_path / "judges.py").write_text(JUDGES)
    running: list[tuple[ScoringServer, threading.Thread]] = []

    def start(address: str = "tcp://127.0.0.1:*", key_dir: Path | None = None) -> ScoringServer:
        (spec,) = resolve(["judges.py:double"], tmp_path)
        server = ScoringServer([spec], ScoringConfig(), address, REWARD_SERVER, key_dir)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


def ask(address: str, *completions: str, key_dir: Path | None = None, timeout_s: float = 60.0, retries: int = 3) -> list[Score]:
    options: dict[str, Any] = {"address": address, **({"keys": str(key_dir)} if key_dir else {})}
    settings = {"timeout_s": timeout_s, "retries": retries}
    with Bench(resolve(["remote"], Path.cwd(), {"answer"}, {"remote": options}, {"remote": settings})) as bench:
        return [scores["remote"] for scores in bench.score(*completions, answer={1, 2})]


def test_a_served_reward_answers_as_it_would_at_home(serve: Callable[..., ScoringServer]) -> None:
    server = serve()
    scores = ask(server.address, "4", "none", "wrong", "absurd", "half \ud800", *map(str, range(200)))
    assert scores[:2] == [Score(8.0, metrics={"length": 1.0}), Score()]
    assert [score.failure for score in scores[2:5]] == [
        "ValueError: no number",
        "returned float 1e+308; a score must be finite and within +-1e+18",
        "ValueError: half \ud800",
    ]
    assert [score.value for score in scores[5:]] == [2.0 * n for n in range(200)]
    assert server.counters["answered"] == 205


def test_without_keys_a_reward_is_served_on_this_machine_only_and_never_at_an_address_that_is_taken(
    serve: Callable[..., ScoringServer],
) -> None:
    with pytest.raises(ConfigError, match=r"served on this machine only.*--keys"):
        serve("tcp://0.0.0.0:*")
    server = serve()
    with pytest.raises(ConfigError, match="cannot be used: Address already in use"):
        serve(server.address)


def test_with_keys_only_those_on_the_list_are_answered(serve: Callable[..., ScoringServer], tmp_path: Path) -> None:
    keys.create(tmp_path / "keys", ["friend"], new_pair)
    keys.create(tmp_path / "other", ["stranger"], new_pair)
    server = serve(key_dir=tmp_path / "keys")
    (score,) = ask(server.address, "3", key_dir=tmp_path / "keys" / "for-friend")
    assert score.value == 6.0
    for key_dir in (None, tmp_path / "other" / "for-stranger"):
        (score,) = ask(server.address, "3", key_dir=key_dir, timeout_s=0.5, retries=0)
        assert "timed out after 0.5 s" in (score.failure or "")


def test_rubbish_is_counted_and_the_server_goes_on(serve: Callable[..., ScoringServer]) -> None:
    server = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(server.address)
        request = ScoreRequest(id=7, members=[{"completion": "1"}], timeout_s=60.0)
        for rubbish in (b"", b"\xc1", b"\x80", REWARDS.pack(request)[:-1]):
            socket.send(rubbish)
            socket.send_multipart([b"", rubbish])
        socket.send_multipart([b"5", STAGES.pack(request.model_copy(update={"stage": "other"}))])
        socket.send_multipart(frames_of(request.model_copy(update={"members": [{"completion": "1", "prompt_ids": 3}]})))
        socket.send_multipart(frames_of(request.model_copy(update={"id": 8})))
        found = [REWARDS.unpack(socket.recv()) for _ in range(3)]
        responses = {each.id: each.answers[0] for each in found if isinstance(each, ScoreResponse)}
        assert "there is no stage 'other'" in str(responses[5].failure)
        assert responses[7].value == responses[8].value == 2.0
    assert server.counters["refused"] == 9


def test_messages_of_another_protocol_or_size_are_refused() -> None:
    with pytest.raises(WireError, match="what is no message of protocol 1"):
        REWARDS.unpack(b"\x92\x02" + STAGES.pack(Heartbeat())[2:])
    with pytest.raises(WireError, match="at most"):
        REWARDS.pack(ScoreRequest(id=1, members=[{"completion": "x" * (5 << 20)}]))
    with pytest.raises(WireError, match="what is no message of protocol 1"):
        REWARDS.unpack(STAGES.pack(ScoreRequest(id=1, members=[{"column": {3: 4}}])))
