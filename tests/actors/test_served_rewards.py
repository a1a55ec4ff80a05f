"""Rewards that a server runs, for the actors of its machine (a scorer) or for anyone (a reward server), over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardSpec, resolve
from async_rlhf.actors.scoring.pool import GroupMember
from async_rlhf.actors.scoring.server import ScoringServer
from async_rlhf.actors.workers import client
from async_rlhf.actors.workers.client import describe
from async_rlhf.actors.workers.messages import (
    SERVED,
    STAGES,
    Describe,
    Description,
    Leave,
    MissingSteps,
    SessionBeat,
    SessionRefused,
    SessionStep,
    Show,
    Stepped,
    frames_of,
    to_answers,
    to_fields,
)
from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.protocol.message import CODEC_PROTOCOL
from async_rlhf.buffers.record import Score
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.link import new_pair
from tests.actors.scored import FIELDS, Bench
from tests.actors.served import Peer, running
from tests.conftest import wait_for

JUDGES = """
import asyncio, os
from pathlib import Path
from async_rlhf.actors.rewards import Score, Stream, reward
from async_rlhf.actors.rewards.answer import Logprobs
import numpy as np

seen = {}
def prefetch(completions, stream_ids, log):
    seen.update(zip(stream_ids, completions))

def forget(stream_ids, log):
    Path(log).write_text(str(sorted(seen)))
    for stream in stream_ids: seen.pop(stream)

@reward(stream=Stream(prefetch, forget), stream_tokens=1, workers=1, batch_size=4, batch_wait_s=60)
def together(completions, stream_ids, log):
    read = [len(seen.pop(stream, "")) for stream in stream_ids]
    return [Score(len(each), metrics={"batch": len(completions), "read": r}) for each, r in zip(completions, read)]

@reward(scope="group")
def longest(completions): return [float(len(each) == max(map(len, completions))) for each in completions]

@reward(workers=1, batch_size=2)
def tokens(completions, completion_ids): return [Logprobs(-np.array(ids, np.float32) / 3) for ids in completion_ids]

async def waits(completion, gate):
    while not Path(gate).exists(): await asyncio.sleep(0.01)
    return float(os.getpid())

def near(completion): return float(os.getpid())

def column(completion, column): return float(column["a"][1])

def double(completion, factor=2.0):
    if completion == "too large": return Logprobs(np.zeros(2 << 20, np.float32))
    if completion == "wrong": raise ValueError("no number")
    if completion == "none": return None
    if completion.startswith("half"): raise ValueError(completion)
    return Score(factor * float(completion), metrics={"length": len(completion)})
"""
SETTINGS = {"placement": "process", "stages": {"near": {"placement": "actor"}}}


class Machine:
    """A scorer in a thread of its own, and actors that ask it."""

    def __init__(self, directory: Path, sockets: Path) -> None:
        (directory / "judges.py").write_text(JUDGES)
        self.gate, self.log = directory / "gate", directory / "log"
        self._directory, self.address, self._made = directory, f"ipc://{sockets}/scorer", ExitStack()

    def specs(self, *names: str) -> tuple[RewardSpec, ...]:
        options = {"waits": {"gate": str(self.gate)}, "together": {"log": str(self.log)}}
        chosen = {name: options[name] for name in names if name in options}
        return resolve([f"judges.py:{name}" for name in names], self._directory, options=chosen)

    def start(self, *names: str, **service: Any) -> None:
        config = ScoringConfig.model_validate(SETTINGS)
        specs = [spec for spec in self.specs(*names) if config.in_process(spec.name)]
        self._made.enter_context(running(ScoringServer(specs, config, self.address, is_private=True, **service)))

    def stop(self) -> None:
        self._made.close()

    def actor(self, *names: str) -> Bench:
        return Bench(self.specs(*names), scorer=self.address, **SETTINGS)

    def num_waiting(self) -> int:
        return describe(self.address, 60.0).waiting


@pytest.fixture
def machine(tmp_path: Path, socket_dir: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, socket_dir)
    yield made
    made.stop()


def show(actor: Bench, key: str, text: str) -> None:
    """Until it is read: a text that is shown while no scorer runs is lost."""

    def look() -> bool:
        actor.pool.show(key, {**FIELDS, "completion": text})
        return actor.pool.poll() == [] and actor.pool.counters["together"].shown > 0

    actor.until(look)


def test_actors_share_a_stage_its_batches_and_what_it_has_read(machine: Machine) -> None:
    names = ("together", "longest", "tokens", "near")
    machine.start(*names)
    with machine.actor(*names) as one, machine.actor(*names) as other:
        for actor in (one, other):  # both number their streams from 0
            show(actor, "a", "x")
        for actor, texts in ((one, {"a": "xy", "b": "xyz"}), (other, {"a": "xxxx", "c": "x"})):
            for member, (key, text) in enumerate(texts.items()):
                actor.submit(key, text, GroupMember("group", member, 2))
        found = [actor.wait() for actor in (one, other)]
    assert {key: scored.scores["together"].value for key, scored in found[0].items()} == {"a": 2.0, "b": 3.0}
    assert {key: scored.scores["together"].value for key, scored in found[1].items()} == {"a": 4.0, "c": 1.0}
    metrics = [scored.scores["together"].metrics for each in found for scored in each.values()]
    assert [each["batch"] for each in metrics] == [4.0] * 4, "completions of two actors in one call"
    assert sorted(each["read"] for each in metrics) == [0.0, 0.0, 1.0, 1.0]
    assert [each["a"].scores["longest"].value for each in found] == [0.0, 1.0], "groups stay apart"
    for scored in (scored for each in found for scored in each.values()):
        assert scored.reference is not None
        assert scored.reference.tolist() == (-np.array(FIELDS["completion_ids"], np.float32) / 3).tolist()
        assert scored.stages["together"].ended >= scored.stages["together"].began > 0
    assert found[0]["a"].ahead_s["together"] >= 0
    assert len({each["a"].scores["near"].value for each in found}) == 2, "what is placed in the actor stays there"
    state = describe(machine.address, 60.0)
    assert state.waiting == 0 and state.answered == 2 * (2 + 1 + 2)


def test_requests_of_a_scorer_that_dies_are_sent_to_the_next_and_those_before_the_first_wait_for_it(machine: Machine) -> None:
    with machine.actor("waits") as actor:
        for key in "abc":
            actor.submit(key, key)
        machine.start("waits")
        wait_for(lambda: machine.num_waiting() == 3, "the requests to arrive")
        assert actor.pool.num_resent == 0
        machine.stop()
        actor.submit("d", "d")
        machine.start("waits")
        machine.gate.touch()
        found = actor.wait()
        assert 3 <= actor.pool.num_resent <= 4 and actor.pool.counters["waits"].failed.total() == 0
    assert sorted(found) == list("abcd") and all(scored.scores["waits"].state == "value" for scored in found.values())


def test_what_a_silent_actor_has_requested_is_dropped(machine: Machine) -> None:
    machine.start("waits", "together", silent_s=3.0)
    with machine.actor("waits", "together") as left:
        with machine.actor("waits", "together") as gone:
            show(gone, "a", "x")
            gone.submit("b", "b")
            wait_for(lambda: machine.num_waiting() >= 1, "the request to arrive")
        wait_for(machine.log.exists, "its streams to be forgotten")
        wait_for(lambda: machine.num_waiting() == 0, "its tasks to be dropped")
        machine.gate.touch()
        for key in "cdef":
            left.submit(key, key)
        found = left.wait()
    assert all(found[key].scores["waits"].state == "value" for key in "cdef")
    assert [found[key].scores["together"].metrics["batch"] for key in "cdef"] == [4.0] * 4, "none of what was dropped"


def test_an_actor_that_was_taken_for_gone_and_is_not_requests_again(machine: Machine) -> None:
    machine.start("waits", silent_s=0.5)  # shorter than the time between two beats
    with machine.actor("waits") as actor:
        actor.submit("a", "a")
        wait_for(lambda: actor.pool.num_resent, "the task to be dropped and requested again")
        machine.gate.touch()
        assert actor.wait()["a"].scores["waits"].state == "value"


def test_a_column_travels_as_it_is_or_the_score_fails(machine: Machine) -> None:
    machine.start("column")
    columns = {"plain": {"a": [0, 7], 3: None}, "strange": {"a": [0, Fraction(1, 2)]}, "unreadable": {"a": {(1, 2): 3}}}
    with machine.actor("column") as actor:
        for key, column in columns.items():
            actor.submit(key, "x", column=column)
        found = {key: scored.scores["column"] for key, scored in actor.wait().items()}
    assert found["plain"].value == 7.0
    assert "what is no message" in str(found["unreadable"].failure)
    assert "the columns of a reward cannot travel" in str(found["strange"].failure)


# -- a reward server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ScoringServer]]:
    (tmp_path / "judges.py").write_text(JUDGES)
    with ExitStack() as made:

        def start(address: str = "tcp://127.0.0.1:*", key_dir: Path | None = None) -> ScoringServer:
            server = ScoringServer(resolve(["judges.py:double"], tmp_path), ScoringConfig(), address, key_dir)
            made.enter_context(running(server))
            return server

        yield start


def ask(address: str, *completions: str, key_dir: Path | None = None, timeout_s: float = 60.0, retries: int = 3) -> list[Score]:
    options: dict[str, Any] = {"address": address, **({"keys": str(key_dir)} if key_dir else {})}
    settings = {"timeout_s": timeout_s, "retries": retries}
    with Bench(resolve(["remote"], Path.cwd(), {"remote": options}, {"remote": settings})) as bench:
        return [scores["remote"] for scores in bench.score(*completions, answer={1, 2})]


def test_a_served_reward_answers_as_it_would_in_the_actor(serve: Callable[..., ScoringServer]) -> None:
    server = serve()
    scores = ask(server.address, "4", "none", "wrong", "half \ud800", *map(str, range(200)), "9" * (5 << 20), "too large")
    assert scores[:2] == [Score(8.0, metrics={"length": 1.0}), Score()]
    assert [score.failure for score in scores[2:4]] == ["ValueError: no number", "ValueError: half \ud800"]
    assert [score.value for score in scores[4:-2]] == [2.0 * n for n in range(200)]
    assert all("at most 4194304 are sent" in str(score.failure) for score in scores[-2:]), "the request, and the answer"
    assert server.counters["answered"] == 204


def test_with_keys_only_those_on_the_list_are_answered_and_the_others_name_the_server_that_is_silent(
    serve: Callable[..., ScoringServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "_UNANSWERED_BEAT_S", 0.1)
    keys.create(tmp_path / "keys", ["friend"], new_pair)
    keys.create(tmp_path / "other", ["stranger"], new_pair)
    server = serve(key_dir=tmp_path / "keys")
    (score,) = ask(server.address, "3", key_dir=tmp_path / "keys" / "for-friend")
    assert score.value == 6.0
    for key_dir in (None, tmp_path / "other" / "for-stranger"):
        (score,) = ask(server.address, "3", key_dir=key_dir, timeout_s=0.5, retries=0)
        assert f"{server.address} did not answer in time: 0.5 s (scoring.timeout_s)" in (score.failure or "")
    assert f"{server.address} has not answered for 0 s" in caplog.text


def test_without_keys_nothing_is_served_beyond_this_machine_and_never_at_an_address_that_is_taken(
    serve: Callable[..., ScoringServer],
) -> None:
    with pytest.raises(ConfigError, match=r"a reward is served on this machine only.*--keys"):
        serve("tcp://0.0.0.0:*")
    server = serve()
    with pytest.raises(ConfigError, match="cannot be used: Address already in use"):
        serve(server.address)
    with pytest.raises(ConfigError, match="'nowhere' is no address"):
        ask("nowhere", "1")


def test_what_cannot_be_read_is_counted_and_refused_by_its_number_and_the_server_goes_on(
    serve: Callable[..., ScoringServer],
) -> None:
    server = serve()
    step = SessionStep(id=7, members=[{"completion": "1"}])
    with Peer(server.address) as peer:
        for data in (b"", b"\xc1", b"\x80", SERVED.pack(step)[:-1]):
            peer.send(data, [b"", data])
        refused = {
            5: (STAGES.pack(step.model_copy(update={"stage": "other"})), "there is no stage 'other'"),
            6: (SERVED.pack(SessionStep(id=6)), "has no members"),
            8: (SERVED.pack(step)[:-1], f"what is no message of protocol {CODEC_PROTOCOL}"),
            9: (SERVED.pack(SessionStep(id=9, turn=1, text="")), None),
        }
        for number, (data, reason) in refused.items():
            peer.send([b"%d" % number, data])
            answer = peer.receive()
            assert (
                isinstance(answer, SessionRefused) and str(reason) in answer.reason and answer.id == number
            ) or not reason, answer
        peer.send(Show(stage="double", stream=0, member={}), step.model_copy(update={"members": [{"completion": "1"}, {}]}))
        peer.send(step.model_copy(update={"id": 10, "members": [{"completion": "1", "prompt_ids": 3}]}))
        found = [peer.receive() for _ in range(2)]
        assert sorted(each.id for each in found if isinstance(each, Stepped)) == [7, 10]
    assert server.counters["refused"] == 12


def test_an_answer_is_kept_until_a_beat_names_its_session_no_longer_and_a_step_is_taken_once(
    serve: Callable[..., ScoringServer],
) -> None:
    server = serve()
    step = SessionStep(id=3, members=[{"completion": "2"}])
    with Peer(server.address) as peer:
        peer.send(step, step)
        answer = peer.receive()
        assert isinstance(answer, Stepped) and answer.answers[0].value == 4.0
        for again in (step, SessionBeat(open=[(3, 0)])):
            peer.send(again)
            assert peer.receive() == answer
        assert peer.receive() == MissingSteps(ids=[]) and server.num_sessions == 1
        peer.send(SessionBeat(open=[(4, 0)]))
        assert peer.receive() == MissingSteps(ids=[4]) and server.num_sessions == 0
        peer.send(step, Leave(ids=[3]), Describe())
        while not isinstance(peer.receive(), Description):  # the step's answer may come first
            pass
        assert server.num_sessions == 0
    assert server.counters["requested"] == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93\x01\x02",
        STAGES.pack(Describe())[:-3],
        msgpack.packb([CODEC_PROTOCOL, {"type": "who"}]),
        b"\x92\x07\x80",
        msgpack.packb([CODEC_PROTOCOL - 1, {"type": "describe"}]),
        STAGES.pack(SessionStep(id=1, members=[{"column": {3: 4}}])),
    ],
)
def test_what_is_no_message_is_one_error(data: bytes) -> None:
    with pytest.raises(WireError, match=f"what is no message of protocol {CODEC_PROTOCOL}"):
        SERVED.unpack(data)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "who"}, "type 'who' is no message of this protocol, which has describe, session_step, show, "),
        ({"type": "session_beat", "open": 3}, "field 'session_beat.open' = '3': Input should be a valid list"),
    ],
)
def test_the_type_or_field_that_makes_it_no_message_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(WireError, match=f"protocol {CODEC_PROTOCOL} of a session: {said}"):
        SERVED.unpack(msgpack.packb([CODEC_PROTOCOL, fields]))


def test_messages_arrive_as_they_were_sent() -> None:
    answer = Answer(None, None, {"prefetched": 0.5}, 1.0, 2.0, np.array([-1.5, 0.0], np.float32))
    for message in (
        Stepped(id=3, turn=0, answers=[to_fields(answer)]),
        Show(stage="r", stream=1, member={"completion": "x", "n": 1}),
        SessionBeat(open=[(1, 0), (2, -1)]),
    ):
        assert STAGES.unpack(frames_of(message, STAGES)[1]) == message
    (back,) = to_answers([to_fields(answer)])
    assert back._replace(logprobs=None) == answer._replace(logprobs=None)
    assert back.logprobs is not None and back.logprobs.tolist() == [-1.5, 0.0]
