"""A hub whose prompts come while it runs: credits carry their rows, and a learner without prompts, or room, gets the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.spool.deposit import MAX_ROW_BYTES, end, put
from async_rlhf.buffers.spool.stream import Stream
from tests.buffers.hub.spoken import Spoken, spool_of

BOUND = Bound(groups_per_batch=2, max_staleness=1, num_groups=1 << 62, numbers=0, coming=True)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Spoken]:
    """Its actor serves version 0 and its learner waits for the first batch; each row of its spool makes two groups."""
    with closing(Stream(tmp_path / "own", repeat=2)) as stream, closing(Journal(tmp_path / "queue")) as journal:
        hub = Spoken(BOUND, journal, prompts=Prompts(spool_of(tmp_path, stream)))
        hub.begin()
        hub.take(0)
        yield hub


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_learner_waits_for_prompts_by_name_until_rows_come_with_the_credits(fed: Spoken, spool: Path) -> None:
    assert fed.status()["lacks_prompts"] and fed.status()["waiting_for"] == "no prompts in the spool: none has come yet"
    put(spool, [json.dumps({"prompt": str(number), "answer": 3}).encode() for number in range(2)])
    credits = [item for message in fed.turn() if isinstance(message, wire.Credits) for item in message.credits]
    assert [(item.number, json.loads(item.row)["prompt"]) for item in credits] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
    assert not fed.status()["lacks_prompts"] and "4 are being made" in fed.status()["waiting_for"]
    again = fed.hello(holding=[(0, 0)])
    rows = {item.number: item.row for message in again if isinstance(message, wire.Credits) for item in message.credits}
    assert rows == {item.number: item.row for item in credits[1:]}, "what is credited again has the same row"


def test_large_rows_come_in_several_messages_that_fit_into_their_headers(fed: Spoken, spool: Path) -> None:
    put(spool, [json.dumps({"prompt": "ä" * (MAX_ROW_BYTES // 8)}).encode() for _ in range(6)])
    credited = [message for message in fed.turn() if isinstance(message, wire.Credits)]
    assert [item.number for message in credited for item in message.credits] == [0, 1, 2, 3]  # (S + 1) B
    assert len(credited) > 1


def test_a_drain_ends_a_run_that_waits_for_prompts(fed: Spoken) -> None:
    assert [message.reason for message in fed.hear(b"s", wire.Drain()) if isinstance(message, wire.Ended)] == ["drained"]


def test_a_spool_that_ends_empty_ends_the_run(fed: Spoken, spool: Path) -> None:
    end(spool)
    said = [message.reason for message in fed.turn() if isinstance(message, wire.Ended)]
    assert said == ["finished"] and fed.status()["spool"]["ended"] and not fed.status()["lacks_prompts"]


def test_with_little_room_no_group_is_begun_and_the_learner_is_told_until_there_is_more(fed: Spoken, spool: Path) -> None:
    fed.exchange.little_room = "the disk has 1 MiB left"
    put(spool, [json.dumps({"prompt": str(number)}).encode() for number in range(2)])
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
