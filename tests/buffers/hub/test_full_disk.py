"""A disk that is full: nothing acknowledged is lost, nobody is told what is not so, and all go on when there is room."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from async_rlhf.buffers.config import Fsync
from async_rlhf.buffers.errors import DiskFullError, JournalError
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal, Replay
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.queue.quarantine import Quarantine
from async_rlhf.buffers.record import Entry
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import Begun, Place, come_back, delivered, holds, taken, tensors, until
from tests.conftest import file_size_limit
from tests.simulation.disk import MemoryDisk

ENTRY = Entry(attempt=0, oldest_version=0, newest_version=0, num_tokens=1, num_bytes=100)
FSYNCS: tuple[Fsync, ...] = get_args(Fsync)
SEEDS = integers(0, 1 << 30)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def journal_on(disk: MemoryDisk, fsync: Fsync = "group", clock: Clock | None = None) -> Journal:
    return Journal(Path("/q"), segment_bytes=700, fsync=fsync, files=disk, clock=clock or Clock())


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
def test_each_fsync_keeps_its_promise_when_the_power_fails(seed: int, count: int) -> None:
    """group: everything is there; interval: everything older than the interval, and every batch with all before it."""
    kept = dict[Fsync, int]()
    for fsync in FSYNCS:
        disk, clock = MemoryDisk(Random(seed)), Clock()
        journal = journal_on(disk, fsync, clock)
        promised = 0
        for number in range(count):
            clock.now += 0.3
            journal.put(number, ENTRY, b"x" * 50)
            if number == 4:
                journal.take(0, [0, 1])
            journal.sync()
            if fsync == "group" or number == 4 or (fsync == "interval" and clock.now - journal._synced_at == 0):
                promised = number + 1
        disk.crash()
        assert fsync == "off" or len(journal_on(disk, fsync).replay.entries) >= promised
        kept[fsync] = promised
    assert kept["group"] == count and count - kept["interval"] <= 4


def test_a_process_that_dies_loses_nothing_acknowledged_in_any_mode(tmp_path: Path) -> None:
    for fsync in FSYNCS:
        journal = Journal(tmp_path / fsync, fsync=fsync)
        journal.put(7, ENTRY, b"group")
        journal.sync()
        for file in (journal._lock, journal._file):  # as the kernel does with a killed process: its own memory is gone
            assert file is not None
            file.close()
        again = Journal(tmp_path / fsync, fsync=fsync)
        assert list(again.replay.entries) == [7]
        again.close()


def two_lives_and_a_crash(seed: int) -> Replay:
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
    return journal_on(disk).replay


@settings(max_examples=40)
@given(SEEDS)
def test_what_a_dead_hub_left_half_written_does_not_become_damage_in_an_older_segment(seed: int) -> None:
    assert {0, 2} <= two_lives_and_a_crash(seed).entries.keys()


def test_that_would_be_found_if_the_newest_segment_were_not_made_durable_when_it_is_read() -> None:
    honest = MemoryDisk.sync_path

    def careless(self: MemoryDisk, path: Path) -> None:
        if path not in self._names:
            honest(self, path)

    with patch.object(MemoryDisk, "sync_path", careless), pytest.raises(JournalError, match="damaged"):
        for seed in range(200):
            two_lives_and_a_crash(seed)


def test_producers_wait_the_status_says_why_and_all_go_on_when_there_is_room(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(2, 1, 8))
    until(holds(anna, 0, 1, 2), anna)
    anna.makes(0)
    size = sum(path.stat().st_size for path in (hub.folder / "queue").glob("*.log"))
    with file_size_limit(size + 100):
        anna.put(1)
        until(lambda: hub.status()["state"] == "disk full", anna)
        anna.put(2)
        until(lambda: hub.status()["puts_later"] >= 2, anna)  # asked to wait, and asked again
        waiting = hub.meanwhile(lambda: taken(learner, 0))
        until(lambda: "the disk is full" in hub.status()["waiting_for"], anna)
        assert anna.client.unacknowledged == [(1, 0), (2, 0)], "nothing is acknowledged that is not on disk"
    until(delivered(anna), anna)
    until(waiting.done, anna)
    assert waiting.result() == [0, 1]
    assert hub.status()["state"] == "running"
    hub.restart()  # and what was acknowledged is really there
    learner.register(0, 0)
    assert taken(learner, 0) == [0, 1]


def test_a_checkpoint_is_committed_when_there_is_room(begun: Callable[..., Begun]) -> None:
    hub, anna, learner = begun(Bound(1, 1, 8))
    anna.makes(0)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    with file_size_limit(100):
        committing = hub.meanwhile(lambda: learner.commit(1))
        until(lambda: hub.status()["state"] == "disk full", anna)
        assert not committing.done()
    until(committing.done, anna)
    assert hub.status()["committed_step"] == 1


def test_in_exact_mode_a_version_is_published_when_there_is_room_for_its_weights(begun: Callable[..., Begun]) -> None:
    """Every version is kept on disk there: the learner waits, nobody is told of it, and the hub goes on."""
    hub, anna, learner = begun(Bound(1, 1, 8, exact=True))
    anna.makes(0)
    assert taken(learner, 0) == [0]
    incarnation = hub.status()["incarnation"]
    weights = hub.folder / "weights"
    with file_size_limit(max(path.stat().st_size for path in weights.iterdir()) - 1):
        publishing = hub.meanwhile(lambda: learner.publish(1, tensors(1)))
        until(lambda: hub.status()["state"] == "disk full", anna)
        assert "version 1 cannot be kept" in hub.status()["waiting_for"]
        assert not publishing.done() and hub.status()["version"] == 0
        # Nothing half written stays, though it is tried again and again.
        until(lambda: [path.name for path in weights.iterdir()] == ["00000000.weights"], anna)
    until(publishing.done, anna)
    publishing.result()
    status = hub.status()
    assert (status["version"], status["state"], status["incarnation"]) == (1, "running", incarnation)
    until(holds(anna, 1), anna)
    anna.put(1)
    until(lambda: (learner.fence, 1) in anna.adopted, anna)
    hub.restart()  # and it is really there
    assert {path.name for path in weights.iterdir()} >= {"00000001.weights"}


@settings(max_examples=20)
@given(SEEDS)
def test_a_set_that_found_no_room_is_kept_once_there_is_some(seed: int) -> None:
    disk = MemoryDisk(Random(seed))
    store = WeightStore(Path("/weights"), disk)
    sets = [WeightSet.of(1, version, tensors(version)) for version in (0, 1)]
    store.add(sets[0])
    disk.full = True
    for _ in range(2):
        with pytest.raises(DiskFullError, match="version 1 cannot be kept in /weights"):
            store.add(sets[1])
        assert 1 not in store
    disk.full = False
    store.add(sets[1])
    disk.crash()
    again = WeightStore(Path("/weights"), disk)
    assert [again.get(version).tensors() for version in (0, 1)] == [each.tensors() for each in sets]


def test_a_quarantined_group_is_written_down_with_its_reasons_and_survives(place: Callable[..., Place]) -> None:
    hub = place(Bound(1, 1, 4), max_attempts=2)
    learner, file = hub.learner(), hub.folder / "quarantine.jsonl"
    for name in ("anna", "ben"):
        actor = hub.actor(name, capacity=1)
        until(holds(actor, 0), actor)
        actor.close()  # by an error: the supervisor sees its end
        with hub.control() as operator:
            operator.gone(name)
        until(lambda: name not in hub.status()["actors"])  # noqa: B023
    until(file.exists)
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["group"] == 0 and record["attempts"] == 2
    ends = [("0", "anna"), ("1", "ben")]
    told = [f"attempt {attempt}: {name} " for attempt, name in ends for _ in range(2)]
    assert all(reason.startswith(each) for reason, each in zip(record["reasons"], told, strict=True)), record
    hub.restart()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [record]
    come_back(learner)
    carl = hub.actor("carl", capacity=1)
    until(lambda: carl.begun, carl)
    assert list(carl.begun) == [1], "the run goes on behind it"
    carl.makes(1)
    assert taken(learner, 0) == [1]


def test_the_file_follows_the_journal_after_a_crash() -> None:
    disk = MemoryDisk(Random(0))
    path = Path("/run/quarantine.jsonl")
    first = Quarantine(path, lambda number: number % 3, [], disk)
    first.write({7: (2, ("a", "b"))})
    first.write({7: (2, ("a", "b")), 9: (2, ("c", "d"))})
    again = Quarantine(path, lambda number: number % 3, [7, 11], disk)  # 9 was never journalled; 11's line was lost
    found = {record["group"]: record for record in map(json.loads, disk.read(path).decode().splitlines())}
    assert found.keys() == {7, 11} and found[7] == {"group": 7, "prompt": 1, "attempts": 2, "reasons": ["a", "b"]}
    disk.full = True
    with pytest.raises(OSError, match="no space"):
        again.write({5: (1, ("e",))})
    disk.full = False
    again.write({5: (1, ("e",))})
    assert b'"group": 5' in disk.read(path)
