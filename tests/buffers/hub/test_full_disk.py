"""A disk that is full: nothing acknowledged is lost, nothing is promised, and all go on when there is room."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from async_rlhf.buffers.config import Fsync
from async_rlhf.buffers.errors import DiskFullError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.recovery import QuarantineFile
from async_rlhf.buffers.record import Entry
from async_rlhf.buffers.weights.store import WeightStore
from tests.buffers.hub.in_process import LEARNER, InProcessHub
from tests.simulation.disk import MemoryDisk

ENTRY = Entry(attempt=0, oldest_version=0, newest_version=0, num_tokens=1, num_bytes=100)
FSYNCS: tuple[Fsync, ...] = get_args(Fsync)
SEEDS = integers(0, 1 << 30)


def journal_on(disk: MemoryDisk, fsync: Fsync = "group") -> Journal:
    return Journal(Path("/q"), segment_bytes=700, fsync=fsync, files=disk)


@settings(max_examples=60)
@given(sampled_from(FSYNCS), SEEDS)
def test_what_could_not_be_written_is_written_once_there_is_room(fsync: Fsync, seed: int) -> None:
    rng, disk = Random(seed), MemoryDisk(Random(seed))
    journal = journal_on(disk, fsync)
    for number in range(40):
        disk.full = rng.random() < 0.5
        journal.put(number, ENTRY, b"%03d" % number * 10)
        if rng.random() < 0.3:
            journal.state(QueueSnapshot(fence=number))
        if disk.full:
            for _ in range(2):
                with pytest.raises(DiskFullError, match="Nothing acknowledged is lost"):
                    journal.sync()
            disk.full = False
        journal.sync()
        assert journal.read(number) == b"%03d" % number * 10
    journal.close()
    replay = journal_on(disk, fsync).replay
    assert sorted(replay.entries) == list(range(40)) and replay.torn_bytes == 0


@settings(max_examples=60)
@given(SEEDS, integers(1, 12))
def test_what_was_synced_is_there_when_the_power_fails(seed: int, count: int) -> None:
    disk = MemoryDisk(Random(seed))
    journal = journal_on(disk)
    for number in range(count):
        journal.put(number, ENTRY, b"x" * 50)
        journal.sync()
    journal.put(count, ENTRY, b"x" * 50)
    disk.crash()
    assert sorted(journal_on(disk).replay.entries) == list(range(count))


def test_a_process_that_dies_loses_nothing_acknowledged_in_any_mode(tmp_path: Path) -> None:
    for fsync in FSYNCS:
        journal = Journal(tmp_path / fsync, fsync=fsync)
        journal.put(7, ENTRY, b"group")
        journal.sync()
        for file in (journal._lock, journal._file):  # as the kernel does with a killed process: its own memory is gone
            file.close()
        again = Journal(tmp_path / fsync, fsync=fsync)
        assert list(again.replay.entries) == [7]
        again.close()


@settings(max_examples=40)
@given(SEEDS)
def test_what_a_dead_hub_left_half_written_does_not_become_damage_in_an_older_segment(seed: int) -> None:
    """A hub ends while its disk is full, the next begins another segment, and then the machine stops."""
    disk = MemoryDisk(Random(seed))
    first = journal_on(disk)
    first.put(0, ENTRY, b"x" * 50)
    first.sync()
    first.put(1, ENTRY, b"y" * 50)
    disk.full = True
    with suppress(DiskFullError):
        first.sync()
    disk.full = False
    second = journal_on(disk)
    second.put(2, ENTRY, b"z" * 50)
    second.sync()
    disk.crash()
    assert {0, 2} <= journal_on(disk).replay.entries.keys()


def test_nothing_is_acknowledged_committed_or_published_while_the_disk_is_full_and_all_of_it_when_there_is_room() -> None:
    """In exact mode every version is kept on disk: the learner waits for that, and no actor is given it before."""
    disk = MemoryDisk(Random(0))
    store = WeightStore(Path("/weights"), disk)
    hub = InProcessHub(Bound(1, 1, 8, exact=True), journal_on(disk), store)
    hub.begin()
    hub.make(0)
    hub.train(0)
    acknowledged = hub.sent_of(wire.Ack)
    disk.full = True
    hub.make(1, version=0)
    commit = wire.Commit(fence=1, step=1)
    assert [type(message) for message in hub.receive(LEARNER, commit)] == [wire.Waiting]
    hub.take(1)
    for _ in range(2):
        hub.tick()
    assert hub.status()["state"] == "disk full" and hub.sent_of(wire.Ack) == acknowledged and len(hub.sent_of(wire.Batch)) == 1
    disk.full = False
    assert wire.Ack(groups=[(1, 0)]) in hub.tick() and len(hub.sent_of(wire.Batch)) == 2
    assert hub.receive(LEARNER, commit) == [wire.Done()]
    hub.receive(LEARNER, wire.Trained(fence=1, step=1))
    disk.full = True
    assert isinstance(hub.publish(2)[0], wire.Waiting) and "version 2 cannot be kept" in hub.status()["waiting_for"]
    assert hub.status()["version"] == 1 and 2 not in store
    disk.full = False
    hub.tick()
    assert (hub.status()["version"], hub.status()["state"]) == (2, "running")
    assert hub.receive(LEARNER, wire.Check(fence=1, version=2)) == [wire.Checked(done=True)]
    disk.crash()
    assert 2 in WeightStore(Path("/weights"), disk)


def test_the_file_follows_the_journal_after_a_crash() -> None:
    disk = MemoryDisk(Random(0))
    path = Path("/run/quarantine.jsonl")
    first = QuarantineFile(path, lambda number: number % 3, [], disk)
    first.write({7: (2, ("a", "b"))})
    first.write({7: (2, ("a", "b")), 9: (2, ("c", "d"))})
    again = QuarantineFile(path, lambda number: number % 3, [7, 11], disk)  # 9 was never journalled; 11's line was lost
    found = {record["group"]: record for record in map(json.loads, disk.read(path).decode().splitlines())}
    assert found.keys() == {7, 11} and found[7] == {"group": 7, "prompt": 1, "attempts": 2, "reasons": ["a", "b"]}
    disk.full = True
    with pytest.raises(OSError, match="no space"):
        again.write({5: (1, ("e",))})
    disk.full = False
    again.write({5: (1, ("e",))})
    assert b'"group": 5' in disk.read(path)
