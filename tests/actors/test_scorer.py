"""Stages that a machine runs once for all its actors: over a real socket, through the pools of two actors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardSpec, resolve
from async_rlhf.actors.scoring.messages import (
    STAGES,
    Heartbeat,
    Message,
    PrefetchRequest,
    ScoreResponse,
    to_answers,
    to_fields,
)
from async_rlhf.actors.scoring.pool import Place
from async_rlhf.actors.scoring.remote_executor import server_state
from async_rlhf.actors.scoring.server import SCORER, ScoringServer
from async_rlhf.buffers.errors import DeadlineError, WireError
from tests.actors.scored import FIELDS, Bench
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
"""
SETTINGS = {"placement": "process", "stages": {"near": {"placement": "actor"}}}


class Machine:
    """A scorer in a thread of its own, and actors that ask it."""

    def __init__(self, directory: Path, sockets: Path) -> None:
        (directory / "judges.py").write_text(JUDGES)
        self.gate, self.log = directory / "gate", directory / "log"
        self._directory, self.address = directory, f"ipc://{sockets}/scorer"

    def specs(self, *names: str) -> tuple[RewardSpec, ...]:
        options = {"waits": {"gate": str(self.gate)}, "together": {"log": str(self.log)}}
        chosen = {name: options[name] for name in names if name in options}
        return resolve([f"judges.py:{name}" for name in names], self._directory, options=chosen)

    def start(self, *names: str, **service: Any) -> None:
        config = ScoringConfig.model_validate(SETTINGS)
        specs = [spec for spec in self.specs(*names) if config.in_process(spec.name)]
        self.scorer = ScoringServer(specs, config, self.address, SCORER._replace(**service))
        self._thread = threading.Thread(target=self.scorer.run)
        self._thread.start()

    def stop(self) -> None:
        self.scorer.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def actor(self, *names: str) -> Bench:
        return Bench(self.specs(*names), scorer=self.address, **SETTINGS)

    def num_waiting(self) -> int:
        return server_state(self.address, 60.0).waiting


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
                actor.submit(key, text, Place("group", member, 2))
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
    state = server_state(machine.address, 60.0)
    assert state.waiting == 0 and state.answered == 2 * (2 + 1 + 2)


def test_a_scorer_that_dies_is_asked_again_in_its_next_life_and_nothing_is_lost(machine: Machine) -> None:
    machine.start("waits")
    with machine.actor("waits") as actor:
        for key in "abc":
            actor.submit(key, key)
        wait_for(lambda: machine.num_waiting() == 3, "the scorer to be asked")
        machine.stop()
        actor.submit("d", "d")
        machine.start("waits")
        machine.gate.touch()
        found = actor.wait()
        assert 3 <= actor.pool.num_resent <= 4 and actor.pool.counters["waits"].failed == 0
    assert sorted(found) == list("abcd") and all(scored.scores["waits"].state == "value" for scored in found.values())


def test_an_actor_that_asks_before_there_is_a_scorer_waits_for_it(machine: Machine) -> None:
    machine.gate.touch()
    with machine.actor("waits") as actor:
        actor.submit("a", "a")
        machine.start("waits")
        assert actor.wait()["a"].scores["waits"].state == "value" and actor.pool.num_resent == 0


def test_what_an_actor_asked_that_is_gone_is_dropped(machine: Machine) -> None:
    machine.start("waits", "together", silent_s=3.0)
    with machine.actor("waits", "together") as left:
        with machine.actor("waits", "together") as gone:
            show(gone, "a", "x")
            gone.submit("b", "b")
            wait_for(lambda: machine.num_waiting() >= 1, "the scorer to be asked")
        wait_for(machine.log.exists, "its streams to be forgotten")
        wait_for(lambda: machine.num_waiting() == 0, "its tasks to be dropped")
        machine.gate.touch()
        for key in "cdef":
            left.submit(key, key)
        found = left.wait()
    assert all(found[key].scores["waits"].state == "value" for key in "cdef")
    assert [found[key].scores["together"].metrics["batch"] for key in "cdef"] == [4.0] * 4, "none of what was dropped"


def test_an_actor_that_was_taken_for_gone_and_is_not_asks_again(machine: Machine) -> None:
    machine.start("waits", silent_s=0.5)  # shorter than the time between two beats
    with machine.actor("waits") as actor:
        actor.submit("a", "a")
        wait_for(lambda: actor.pool.num_resent, "the task to be dropped and asked again")
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


def test_nobody_waits_forever_for_a_scorer_that_is_not_there(socket_dir: Path) -> None:
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.2 s"):
        server_state(f"ipc://{socket_dir}/absent", 0.2)


@pytest.mark.parametrize(
    "data", [b"", b"\x93\x01\x02", STAGES.pack(Heartbeat())[:-3], b"\x92\x01\x81\xa4type\xa3who", b"\x92\x07\x80"]
)
def test_what_is_no_message_is_one_error(data: bytes) -> None:
    with pytest.raises(WireError, match="what is no message of protocol 1"):
        STAGES.unpack(data)


def test_messages_arrive_as_they_were_sent() -> None:
    answer = Answer(None, None, "", {"prefetched": 0.5}, 1.0, 2.0, None, np.array([-1.5, 0.0], np.float32))
    messages: list[Message] = [
        ScoreResponse(id=3, answers=[to_fields(answer)]),
        PrefetchRequest(stage="r", stream=1, member={"completion": "x", "n": 1}),
    ]
    assert [STAGES.unpack(STAGES.pack(message)) for message in messages] == messages
    (back,) = to_answers([to_fields(answer)])
    assert back._replace(logprobs=None) == answer._replace(logprobs=None)
    assert back.logprobs is not None and back.logprobs.tolist() == [-1.5, 0.0]
