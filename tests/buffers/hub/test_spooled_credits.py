"""A hub whose prompts come while it runs: credits carry their rows, and a learner without prompts, or room, gets the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.deposit import MAX_ROW_BYTES, end, put
from async_rlhf.buffers.spool.stream import Stream
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet

ACTOR, LEARNER = b"a", b"c"
BOUND = Bound(groups_per_batch=2, max_staleness=1, num_groups=1 << 62, numbers=0, coming=True)


class Fed:
    """A hub with an actor that serves version 0 and a learner that waits for its first batch."""

    def __init__(self, folder: Path, stream: Stream, journal: Journal) -> None:
        self.source = folder / "spool"
        self.source.mkdir()
        self.spool = Spool(self.source, folder / "own", stream, lambda lines: [line.decode() for line in lines])
        self.exchange = Exchange(
            QueueConfig(max_staleness=1), BOUND, journal, WeightStore(), lambda: 0.0, "x", prompts=Prompts(self.spool)
        )
        self.hear(LEARNER, wire.Register(step=0, committed=0, learner="l"))
        self.hear(LEARNER, WeightSet.of(1, 0, {}).announcement())
        self.hear(ACTOR, wire.Hello(actor="anna", life="1", capacity=9, fence=1, version=0))
        self.hear(LEARNER, wire.Take(fence=1, step=0))

    def hear(self, who: bytes, message: wire.Message) -> list[Any]:
        """What is said then, to whomever."""
        self.exchange.receive(who, wire.encode(message, [], 1))
        return self.turn()

    def turn(self) -> list[Any]:
        while self.spool.turn():
            pass
        self.exchange.settle()
        frames, self.exchange.outbox.messages = self.exchange.outbox.messages, []
        return [wire.decode(rest, max_frame_bytes=1 << 24)[1] for _, *rest in frames]

    def status(self) -> dict[str, Any]:
        return self.exchange.status()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Fed]:
    with closing(Stream(tmp_path / "own", repeat=2)) as stream, closing(Journal(tmp_path / "queue")) as journal:
        yield Fed(tmp_path, stream, journal)


def test_a_learner_waits_for_prompts_by_name_until_rows_come_with_the_credits(fed: Fed) -> None:
    assert fed.status()["lacks_prompts"] and fed.status()["waiting_for"] == "no prompts in the spool: none has come yet"
    put(fed.source, [json.dumps({"prompt": str(number), "answer": 3}).encode() for number in range(2)])
    credits = [item for message in fed.turn() if isinstance(message, wire.Credits) for item in message.credits]
    assert [(item.number, json.loads(item.row)["prompt"]) for item in credits] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
    assert not fed.status()["lacks_prompts"] and "4 are being made" in fed.status()["waiting_for"]
    again = fed.hear(ACTOR, wire.Hello(actor="anna", life="1", capacity=9, fence=1, version=0, holding=[(0, 0)]))
    rows = {item.number: item.row for message in again if isinstance(message, wire.Credits) for item in message.credits}
    assert rows == {item.number: item.row for item in credits[1:]}, "what is credited again has the same row"


def test_large_rows_come_in_several_messages_that_fit_into_their_headers(fed: Fed) -> None:
    put(fed.source, [json.dumps({"prompt": "ä" * (MAX_ROW_BYTES // 8)}).encode() for _ in range(6)])
    credited = [message for message in fed.turn() if isinstance(message, wire.Credits)]
    assert [item.number for message in credited for item in message.credits] == [0, 1, 2, 3]  # (S + 1) B
    assert len(credited) > 1


def test_a_drain_ends_a_run_that_waits_for_prompts(fed: Fed) -> None:
    assert [message.reason for message in fed.hear(b"s", wire.Drain()) if isinstance(message, wire.Ended)] == ["drained"]


def test_a_spool_that_ends_empty_ends_the_run(fed: Fed) -> None:
    end(fed.source)
    said = [message.reason for message in fed.turn() if isinstance(message, wire.Ended)]
    assert said == ["finished"] and fed.status()["spool"]["ended"] and not fed.status()["lacks_prompts"]


def test_with_little_room_no_group_is_begun_and_the_learner_is_told_until_there_is_more(fed: Fed) -> None:
    fed.exchange.little_room = "the disk has 1 MiB left"
    put(fed.source, [json.dumps({"prompt": str(number)}).encode() for number in range(2)])
    assert not any(isinstance(message, wire.Credits) for message in fed.turn())
    status = fed.status()
    assert (status["state"], status["waiting_for"]) == ("paused", "the disk has 1 MiB left")
    assert status["lacks_room"] and not status["lacks_prompts"]
    fed.exchange.tick()
    told = [message.detail for message in fed.turn() if isinstance(message, wire.Waiting)]
    assert told == ["the disk has 1 MiB left"]
    fed.exchange.little_room = ""
    assert any(isinstance(message, wire.Credits) for message in fed.turn())
    assert fed.status()["state"] == "running" and not fed.status()["lacks_room"]
