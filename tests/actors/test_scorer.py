"""Stages that a machine runs once for all its actors: over a real socket, through the pools of two actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardSpec, resolve
from async_rlhf.actors.scoring.messages import (
    Heartbeat,
    Message,
    PrefetchRequest,
    ScoreResponse,
    pack,
    to_answers,
    to_fields,
    unpack,
)
from async_rlhf.actors.scoring.pool import Place, Scored, ScoringPool
from async_rlhf.actors.scoring.remote_executor import server_state
from async_rlhf.actors.scoring.server import SCORER, ScoringServer
from async_rlhf.buffers.errors import DeadlineError, WireError

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
CONFIG = ScoringConfig.model_validate({"placement": "process", "stages": {"near": {"placement": "actor"}}})


class Machine:
    """A scorer in a thread of its own, and pools of actors that ask it."""

    def __init__(self, directory: Path, sockets: Path) -> None:
        (directory / "judges.py").write_text(JUDGES)
        self.gate, self.log = directory / "gate", directory / "log"
        self._directory, self.address = directory, f"ipc://{sockets}/scorer"
        self._waker = threading.Event()
        self._pools: list[ScoringPool[str]] = []

    def specs(self, *names: str) -> tuple[RewardSpec, ...]:
        options = {"waits": {"gate": str(self.gate)}, "together": {"log": str(self.log)}}
        chosen = {name: options[name] for name in names if name in options}
        return resolve([f"judges.py:{name}" for name in names], self._directory, options=chosen)

    def start(self, *names: str, **service: Any) -> None:
        specs = [spec for spec in self.specs(*names) if CONFIG.in_process(spec.name)]
        self.scorer = ScoringServer(specs, CONFIG, self.address, SCORER._replace(**service))
        self._thread = threading.Thread(target=self.scorer.run)
        self._thread.start()

    def stop(self) -> None:
        self.scorer.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def pool(self, *names: str) -> ScoringPool[str]:
        self._pools.append(ScoringPool[str](self.specs(*names), CONFIG, self._waker.set, scorer=self.address))
        return self._pools[-1]

    def leave(self, pool: ScoringPool[str]) -> None:
        self._pools.remove(pool)
        pool.close(60.0)

    def until(self, done: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 300
        while not done():
            assert time.monotonic() < deadline, f"waited 300 s for {what}"
            self._waker.wait(0.02)
            self._waker.clear()

    def show(self, pool: ScoringPool[str], key: str, text: str) -> None:
        """Until it was read: what is shown while there is no scorer is shown to nobody."""

        def look() -> bool:
            pool.show(key, fields(text))
            pool.poll()
            return pool.counters["together"].shown > 0

        self.until(look, "the stage to prefetch")

    def answers(self, *pools: ScoringPool[str]) -> dict[str, Scored[str]]:
        found: dict[str, Scored[str]] = {}

        def look() -> bool:
            for pool in pools:
                found.update({scored.key: scored for scored in pool.poll()})
            return not any(pool.num_pending for pool in pools)

        self.until(look, "every score")
        return found

    def close(self) -> None:
        for pool in self._pools:
            pool.close(60.0)
        self.stop()


@pytest.fixture
def machine(tmp_path: Path, socket_dir: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, socket_dir)
    yield made
    made.close()


def fields(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": "p", "completion": text, "prompt_ids": [1], "completion_ids": list(range(len(text))), **columns}


def test_actors_share_a_stage_its_batches_and_what_it_has_read(machine: Machine) -> None:
    names = ("together", "longest", "tokens", "near")
    machine.start(*names)
    one, other = machine.pool(*names), machine.pool(*names)
    for pool in (one, other):  # both number their streams from 0
        machine.show(pool, "a", "x")
    for pool, texts in ((one, {"a": "xy", "b": "xyz"}), (other, {"a": "xxxx", "c": "x"})):
        for member, (key, text) in enumerate(texts.items()):
            pool.submit(key, fields(text), Place("group", member, 2))
    found = [machine.answers(pool) for pool in (one, other)]
    assert {key: scored.scores["together"].value for key, scored in found[0].items()} == {"a": 2.0, "b": 3.0}
    assert {key: scored.scores["together"].value for key, scored in found[1].items()} == {"a": 4.0, "c": 1.0}
    metrics = [scored.scores["together"].metrics for each in found for scored in each.values()]
    assert [each["batch"] for each in metrics] == [4.0] * 4, "completions of two actors in one call"
    assert sorted(each["read"] for each in metrics) == [0.0, 0.0, 1.0, 1.0]
    assert [each["a"].scores["longest"].value for each in found] == [0.0, 1.0], "groups stay apart"
    for each in found:
        for key, scored in each.items():
            assert scored.reference is not None
            assert scored.reference.tolist() == (-np.arange(len(scored.reference), dtype=np.float32) / 3).tolist()
            assert scored.stages["together"].ended >= scored.stages["together"].began > 0, key
    assert found[0]["a"].ahead_s["together"] >= 0
    assert len({each["a"].scores["near"].value for each in found}) == 2, "what is placed in the actor stays there"
    state = server_state(machine.address, 60.0)
    assert state.waiting == 0 and state.answered == 2 * (2 + 1 + 2)


def test_a_scorer_that_dies_is_num_resent_by_its_next_life_and_nothing_is_lost(machine: Machine) -> None:
    machine.start("waits")
    pool = machine.pool("waits")
    for key in "abc":
        pool.submit(key, fields(key))
    machine.until(lambda: server_state(machine.address, 60.0).waiting == 3, "the scorer to be asked")
    machine.stop()
    pool.submit("d", fields("d"))
    machine.start("waits")
    machine.gate.touch()
    found = machine.answers(pool)
    assert sorted(found) == list("abcd") and all(scored.scores["waits"].state == "value" for scored in found.values())
    assert 3 <= pool.num_resent <= 4 and pool.counters["waits"].failed == 0


def test_an_actor_that_asks_before_there_is_a_scorer_waits_for_it(machine: Machine) -> None:
    machine.gate.touch()
    pool = machine.pool("waits")
    pool.submit("a", fields("a"))
    machine.start("waits")
    assert machine.answers(pool)["a"].scores["waits"].state == "value" and pool.num_resent == 0


def test_what_an_actor_asked_that_is_gone_is_dropped(machine: Machine) -> None:
    machine.start("waits", "together", silent_s=3.0)
    gone, left = machine.pool("waits", "together"), machine.pool("waits", "together")
    machine.show(gone, "a", "x")
    gone.submit("b", fields("b"))
    machine.until(lambda: server_state(machine.address, 60.0).waiting >= 1, "the scorer to be asked")
    machine.leave(gone)
    machine.until(lambda: machine.log.exists(), "its streams to be forgotten")
    machine.until(lambda: server_state(machine.address, 60.0).waiting == 0, "its tasks to be dropped")
    machine.gate.touch()
    for key in "cdef":
        left.submit(key, fields(key))
    found = machine.answers(left)
    assert all(found[key].scores["waits"].state == "value" for key in "cdef")
    assert [found[key].scores["together"].metrics["batch"] for key in "cdef"] == [4.0] * 4, "none of what was dropped"


def test_an_actor_that_was_taken_for_gone_and_is_not_asks_again(machine: Machine) -> None:
    machine.start("waits", silent_s=0.5)  # shorter than the time between two beats
    pool = machine.pool("waits")
    pool.submit("a", fields("a"))
    machine.until(lambda: pool.num_resent, "the task to be dropped and asked again")
    machine.gate.touch()
    assert machine.answers(pool)["a"].scores["waits"].state == "value"


def test_a_column_travels_as_it_is_or_the_score_fails(machine: Machine) -> None:
    machine.start("column")
    pool = machine.pool("column")
    pool.submit("plain", fields("x", column={"a": [0, 7], 3: None}))
    pool.submit("strange", fields("x", column={"a": [0, Fraction(1, 2)]}))
    pool.submit("unreadable", fields("x", column={"a": {(1, 2): 3}}))
    found = machine.answers(pool)
    assert found["plain"].scores["column"].value == 7.0
    assert "what is no message" in str(found["unreadable"].scores["column"].failure)
    assert "cannot travel to the scorer process" in str(found["strange"].scores["column"].failure)


def test_nobody_waits_forever_for_a_scorer_that_is_not_there(socket_dir: Path) -> None:
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.2 s"):
        server_state(f"ipc://{socket_dir}/absent", 0.2)


@pytest.mark.parametrize(
    "data", [b"", b"\x93\x01\x02", pack(Heartbeat())[:-3], b"\x92\x01\x81\xa4type\xa3who", b"\x92\x07\x80"]
)
def test_what_is_no_message_is_one_error(data: bytes) -> None:
    with pytest.raises(WireError, match="what is no message of protocol 1"):
        unpack(data)


def test_messages_arrive_as_they_were_sent() -> None:
    answer = Answer(None, None, "", {"prefetched": 0.5}, 1.0, 2.0, None, np.array([-1.5, 0.0], np.float32))
    messages: list[Message] = [
        ScoreResponse(id=3, answers=[to_fields(answer)]),
        PrefetchRequest(stage="r", stream=1, member={"completion": "x", "n": 1}),
    ]
    assert [unpack(pack(message)) for message in messages] == messages
    (back,) = to_answers([to_fields(answer)])
    assert back._replace(logprobs=None) == answer._replace(logprobs=None)
    assert back.logprobs is not None and back.logprobs.tolist() == [-1.5, 0.0]
