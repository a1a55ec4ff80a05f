"""Prompts that come while a hub runs, or that it chooses: credits carry rows or name places; batches count when durable."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from async_rlhf.buffers.config import CurriculumConfig
from async_rlhf.buffers.curriculum import Order
from async_rlhf.buffers.files import Disk
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.spool.deposit import MAX_ROW_BYTES, end, put
from async_rlhf.buffers.spool.stream import PromptStream
from tests.buffers.hub.in_process import ACTOR, InProcessHub, spool_of

FED = Bound(groups_per_batch=2, max_staleness=1, num_groups=1 << 62, numbers=0, coming=True)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[InProcessHub]:
    """Its actor serves version 0 and its learner waits for the first batch; each row of its spool makes two groups."""
    with closing(PromptStream(tmp_path / "own", repeat=2)) as stream, closing(Journal(tmp_path / "queue")) as journal:
        hub = InProcessHub(FED, journal, prompts=Prompts(spool_of(tmp_path, stream)))
        hub.begin()
        hub.take(0)
        yield hub


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_learner_waits_for_prompts_by_name_until_rows_come_with_the_credits(fed: InProcessHub, spool: Path) -> None:
    assert fed.status()["waits_for_prompts"] and fed.status()["waiting_for"] == "no prompts in the spool: none has come yet"
    put(spool, [json.dumps({"prompt": str(number), "answer": 3}).encode() for number in range(2)])
    credits = [item for message in fed.turn() if isinstance(message, wire.Credits) for item in message.credits]
    assert [(item.number, json.loads(item.row)["prompt"]) for item in credits] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
    assert not fed.status()["waits_for_prompts"] and "4 are being made" in fed.status()["waiting_for"]
    again = fed.hello(holding=[(0, 0)])
    rows = {item.number: item.row for message in again if isinstance(message, wire.Credits) for item in message.credits}
    assert rows == {item.number: item.row for item in credits[1:]}, "what is credited again has the same row"


def test_large_rows_come_in_several_messages_that_fit_into_their_headers(fed: InProcessHub, spool: Path) -> None:
    put(spool, [json.dumps({"prompt": "ä" * (MAX_ROW_BYTES // 8)}).encode() for _ in range(6)])
    credited = [message for message in fed.turn() if isinstance(message, wire.Credits)]
    assert [item.number for message in credited for item in message.credits] == [0, 1, 2, 3]  # (S + 1) B
    assert len(credited) > 1


def test_a_drain_ends_a_run_that_waits_for_prompts(fed: InProcessHub) -> None:
    assert [message.reason for message in fed.receive(b"s", wire.Drain()) if isinstance(message, wire.Ended)] == ["drained"]


def test_a_spool_that_ends_empty_ends_the_run(fed: InProcessHub, spool: Path) -> None:
    end(spool)
    ends = [message.reason for message in fed.turn() if isinstance(message, wire.Ended)]
    assert ends == ["finished"] and fed.status()["spool"]["ended"] and not fed.status()["waits_for_prompts"]


def test_with_little_room_no_group_is_begun_and_the_learner_waits_until_there_is_more(fed: InProcessHub, spool: Path) -> None:
    fed.exchange.little_room = "the disk has 1 MiB left"
    put(spool, [json.dumps({"prompt": str(number)}).encode() for number in range(2)])
    assert not any(isinstance(message, wire.Credits) for message in fed.turn())
    status = fed.status()
    assert (status["state"], status["waiting_for"]) == ("paused", "the disk has 1 MiB left")
    assert status["waits_for_room"] and not status["waits_for_prompts"]
    fed.exchange.tick()
    details = [message.detail for message in fed.turn() if isinstance(message, wire.Waiting)]
    assert details == ["the disk has 1 MiB left"]
    fed.exchange.little_room = ""
    assert any(isinstance(message, wire.Credits) for message in fed.turn())
    assert fed.status()["state"] == "running" and not fed.status()["waits_for_room"]


BOUND = Bound(groups_per_batch=2, max_staleness=0, num_groups=1 << 62, numbers=0, coming=True)


class Chosen(InProcessHub):
    """A hub of a run with `num_rows` rows, or a spool; its actor and its learner are the test."""

    def __init__(self, folder: Path, num_rows: int, *, fed: bool = False, refills: int = 0, **settings: Any) -> None:
        config = CurriculumConfig(reward="right", **settings)
        self.order, self.journal = Order(folder / "data", config), Journal(folder / "queue")
        spool = spool_of(folder, PromptStream(folder / "own")) if fed else None
        bound = replace(BOUND, refills=refills, numbers=self.order.num_numbers)
        super().__init__(bound, self.journal, prompts=Prompts(spool, self.order, config, num_rows))

    def publish(self, version: int) -> list[Any]:
        super().publish(version)
        return self.receive(ACTOR, wire.Beat(capacity=9, fence=1, version=version))

    @property
    def batches(self) -> list[wire.Batch]:
        return self.sent_of(wire.Batch)

    @property
    def ends(self) -> list[str]:
        return [ended.reason for ended in self.sent_of(wire.Ended)]

    def places(self) -> dict[int, int | None]:
        return {number: item.place for number, item in self.credits.items()}

    def close(self) -> None:
        self.journal.close()
        self.order.close()
        if self.spool is not None:
            self.spool.stream.close()


def refuse_the_order(file: Any) -> None:
    """A sync for which there is no room, of that file."""
    if file.name.endswith("order.jsonl"):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def chosen(tmp_path: Path, stack: ExitStack) -> Callable[..., Chosen]:
    def make(num_rows: int, **settings: Any) -> Chosen:
        made = Chosen(tmp_path, num_rows, **settings)
        stack.callback(made.close)
        return made

    return make


def test_what_is_solved_comes_no_more_and_the_run_ends_when_everything_is(chosen: Callable[..., Chosen]) -> None:
    hub = chosen(3, retire_after=1, new_share=0.0)
    hub.begin()
    assert hub.places() == {0: 0, 1: 1}
    hub.make(0, 1.0)
    hub.make(1, 0.0)
    hub.train(0)
    assert hub.batches[0].telemetry["curriculum/new"] == 1.0
    assert sorted(place for number, place in hub.places().items() if number > 1) == [1, 2]
    assert hub.status()["curriculum"] == {"places": 3, "new": 0, "hard": 1, "retired": 1, "pass_rate": 0.5}
    hub.make(2, 1.0)
    hub.make(3, 1.0)
    hub.train(1)
    hub.take(2)
    assert hub.ends == ["finished"] and len(hub.credits) == 4
    hub.close()
    again = chosen(3, retire_after=1, new_share=0.0).order
    assert (again.describe(0)["new"], again.describe(1)["retired"]) == (1.0, 1.0), "a batch that is given again says the same"


def test_a_hub_that_comes_back_counts_a_batch_that_its_journal_has_and_its_order_not(chosen: Any, tmp_path: Path) -> None:
    hub = chosen(6)
    hub.begin()
    hub.make(0, 0.5)
    hub.make(1, "the judge is away")
    before = (tmp_path / "data" / "order.jsonl").read_bytes()
    hub.take(0)
    counted = (tmp_path / "data" / "order.jsonl").read_bytes()
    assert json.loads(counted.splitlines()[-1])["outcomes"] == [[0, 0.0], [1, None]]
    hub.close()
    (tmp_path / "data" / "order.jsonl").write_bytes(before)
    again = chosen(6)
    again.turn()
    assert (tmp_path / "data" / "order.jsonl").read_bytes() == counted


def test_a_batch_is_not_given_before_its_outcomes_are_on_disk(chosen: Callable[..., Chosen], tmp_path: Path) -> None:
    hub = chosen(6)
    hub.begin()
    hub.make(0, 1.0)
    hub.make(1, 0.0)
    with patch.object(Disk, "sync", side_effect=refuse_the_order):
        hub.take(0)
        assert hub.batches == [] and hub.status()["state"] == "disk full"
    hub.exchange.tick()
    hub.turn()
    assert len(hub.batches) == 1 and hub.status()["curriculum"]["hard"] == 1
    written = map(json.loads, (tmp_path / "data" / "order.jsonl").read_text().splitlines())
    assert [line["step"] for line in written] == [None, 0]


def test_a_filtered_group_counts_with_the_next_batch_and_another_place_is_there_at_once(chosen: Callable[..., Chosen]) -> None:
    hub = chosen(9, refills=2, retire_after=2)
    hub.begin()
    hub.make(0, 1.0, constant=True)
    assert hub.places() == {0: 0, 1: 1, 2: 2} and hub.status()["curriculum"]["pass_rate"] == 0.0
    hub.make(1, 0.0)
    hub.make(2, 0.0)
    hub.train(0)
    assert hub.status()["curriculum"]["pass_rate"] == pytest.approx(1 / 3)
    hub.make(3, 0.0)
    hub.make(4, 0.0)
    hub.train(1)
    assert hub.status()["curriculum"]["retired"] == 0, "it is not counted again, else it would have been solved twice"


def test_a_filtered_group_is_acknowledged_when_it_is_written_down_also_where_the_disk_was_full(
    chosen: Callable[..., Chosen], tmp_path: Path
) -> None:
    """There was no room for the order of the prompts, which is written before the state."""
    hub = chosen(9, refills=2)
    hub.begin()
    with patch.object(Disk, "sync", side_effect=refuse_the_order):
        hub.make(0, 1.0, constant=True)
        assert hub.status()["state"] == "disk full"
    hub.exchange.tick()
    assert any(isinstance(sent, wire.Ack) for sent in hub.turn())
    shutil.copytree(tmp_path / "queue", tmp_path / "as the next hub finds it")
    with closing(Journal(tmp_path / "as the next hub finds it")) as journal:
        assert journal.replay.state.filtered == (0,)


def test_rows_of_a_spool_are_chosen_among_those_that_have_come(chosen: Callable[..., Chosen], tmp_path: Path) -> None:
    hub = chosen(0, fed=True, retire_after=1)
    hub.begin()
    put(tmp_path / "spool", [b'{"prompt": "a"}', b'{"prompt": "b"}'])
    hub.turn()
    assert [json.loads(hub.credits[number].row)["prompt"] for number in (0, 1)] == ["a", "b"]
    hub.make(0, 1.0)
    hub.make(1, 1.0)
    hub.train(0)
    hub.take(1)
    assert hub.status()["waits_for_prompts"] and hub.ends == [], "all are retired, and more may come"
    put(tmp_path / "spool", [b'{"prompt": "c"}'])
    hub.turn()
    assert [json.loads(item.row)["prompt"] for number, item in hub.credits.items() if number > 1] == ["c", "c"]
