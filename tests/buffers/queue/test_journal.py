"""The journal gives back what it was given, whatever was cut off or damaged, or says what is lost."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.config import Fsync
from async_rlhf.buffers.errors import DamagedError, JournalError
from async_rlhf.buffers.queue import segment
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry
from tests.conftest import file_size_limit

SEGMENT_BYTES = 544
MARK_BYTES = len(segment.mark(0))


def entry(number: int) -> Entry:
    return Entry(attempt=number % 3, oldest_version=number, newest_version=number + 1, num_tokens=10 + number)


def payload(number: int, size: int = 60) -> bytes:
    """Bytes that look like a journal's own: kinds and small lengths everywhere."""
    return bytes((number + i) % 4 for i in range(size))


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


@contextmanager
def opened(directory: Path, fsync: Fsync = "off") -> Iterator[Journal]:
    journal = Journal(directory, segment_bytes=SEGMENT_BYTES, fsync=fsync)
    try:
        yield journal
    finally:
        journal.close()


def put(journal: Journal, *numbers: int, size: int = 60) -> None:
    for number in numbers:
        journal.put(number, entry(number), payload(number, size))
    journal.sync()


def put_apart(journal: Journal, *numbers: int) -> None:
    """Every group in a segment of its own."""
    for number in numbers:
        journal.put(number, entry(number), payload(number, SEGMENT_BYTES))
        journal.state(QueueSnapshot())
        journal.sync()


class Memory:
    """What a journal is a memory of: the same calls, kept in dictionaries."""

    def __init__(self) -> None:
        self.state = QueueSnapshot()
        self.entries: dict[int, Entry] = {}
        self.payloads: dict[int, bytes] = {}
        self.batches: dict[int, list[int]] = {}

    def put(self, number: int, size: int) -> None:
        self.entries[number], self.payloads[number] = entry(number), payload(number, size)

    def commit(self, state: QueueSnapshot) -> list[int]:
        done = [step for step in self.batches if step < state.committed_step]
        numbers = [number for step in done for number in self.batches.pop(step)]
        for number in numbers:
            del self.entries[number], self.payloads[number]
        self.state = state
        return numbers

    def check(self, journal: Journal) -> None:
        replay = journal.replay
        assert (replay.state, replay.entries, replay.batches) == (self.state, self.entries, self.batches)
        assert {number: journal.read(number) for number in self.entries} == self.payloads


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 300)),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("commit"), st.integers(0, 3)),
        st.tuples(st.just("state"), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_what_was_appended_is_what_is_replayed(operations: list[tuple[str, int]]) -> None:
    memory, next_number, next_step = Memory(), 0, 0
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:

        def begin() -> Journal:
            stack.close()
            return stack.enter_context(opened(Path(directory)))

        journal = begin()
        for kind, amount in operations:
            queued = [n for n in memory.entries if not any(n in batch for batch in memory.batches.values())]
            if kind == "put":
                memory.put(next_number, amount)
                put(journal, next_number, size=amount)
                next_number += 1
            elif kind == "take" and queued:
                memory.batches[next_step] = queued[:amount]
                journal.take(next_step, queued[:amount])
                next_step += 1
            elif kind in ("commit", "state"):
                committed = max(memory.state.committed_step, next_step - amount) if kind == "commit" else None
                step = memory.state.committed_step if committed is None else committed
                state = QueueSnapshot(committed_step=step, head=next_number, consumed=(1, 2), quarantined=(1 << 20,))
                journal.state(state, memory.commit(state))
                journal.sync()
            elif kind == "reopen":
                journal = begin()
                memory.check(journal)
            journal.sync()
            assert {number: journal.read(number) for number in memory.payloads} == memory.payloads
        memory.check(begin())


def test_cut_at_any_byte_it_loses_nothing_that_was_synced_and_invents_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "queue"
    with opened(directory) as journal:
        put(journal, 0, 1)
        synced = segments(directory)[-1].stat().st_size
        journal.put(2, entry(2), payload(2))
        journal.take(0, [0, 2])
        journal.put(3, entry(3), payload(3))
    whole = segments(directory)[-1].read_bytes()
    seen = set()
    for length in range(synced, len(whole) + 1):
        cut = tmp_path / "cut"
        shutil.copytree(directory, cut)
        segments(cut)[-1].write_bytes(whole[:length])
        with opened(cut) as journal:
            replay = journal.replay
            numbers, batches = list(replay.entries), replay.batches
            assert numbers in ([0, 1], [0, 1, 2], [0, 1, 2, 3])
            assert batches == ({} if len(numbers) == 2 else batches) and batches in ({}, {0: [0, 2]})
            assert 3 not in numbers or batches
            assert [journal.read(number) for number in numbers] == [payload(number) for number in numbers]
            seen.add((len(numbers), len(batches)))
            put(journal, 9)  # and goes on
        with opened(cut) as journal:
            assert list(journal.replay.entries) == [*numbers, 9]
            assert journal.replay.torn_bytes == 0
        shutil.rmtree(cut)
    assert seen == {(2, 0), (3, 0), (3, 1), (4, 1)}


def damaged(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def test_a_flipped_byte_of_what_was_on_disk_is_named_and_not_cut_off(tmp_path: Path) -> None:
    """Any byte before the last mark, of the newest segment (its last whole record too) and of older ones."""
    directory = tmp_path / "queue"
    with opened(directory, "group") as journal:
        for number in range(3):
            put(journal, number)
    older = tmp_path / "older"
    shutil.copytree(directory, older)
    with opened(older):
        pass  # begins a segment behind it
    assert len(segments(older)) == 2
    end = len(segments(older)[0].read_bytes())
    for base, last in ((directory, end - MARK_BYTES), (older, end)):
        for offset in range(0, last, 3):
            copy = tmp_path / "copy"
            shutil.copytree(base, copy)
            path = segments(copy)[0]
            damaged(path, offset)
            with pytest.raises(DamagedError) as raised:
                Journal(copy)
            message = str(raised.value)
            assert str(path) in message
            named = int(message.split("damaged at byte ")[1].split(":")[0])
            assert named <= offset
            assert path.stat().st_size == end, "nothing was cut off"
            shutil.rmtree(copy)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_pages_of_an_unfinished_round_that_are_missing_anywhere_cost_that_round_alone(lost: list[bool], phase: int) -> None:
    """The machine lost power before the fsync returned; the disk had written some pages of the round, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "queue"
        with opened(directory, "group") as journal:
            put(journal, 0, 1)
            synced = segments(directory)[-1].stat().st_size
            for number in (2, 3, 4, 5):
                journal.put(number, entry(number), payload(number))
            journal.take(0, [0, 1])
        path = segments(directory)[-1]
        data = bytearray(path.read_bytes()[:-MARK_BYTES])  # the fsync never returned
        for page, is_lost in enumerate(lost):
            begin = max(synced, synced + 16 * page - phase % 16)
            end = min(len(data), synced + 16 * (page + 1) - phase % 16)
            if is_lost and begin < end:
                data[begin:end] = bytes(end - begin)
        path.write_bytes(bytes(data))
        with opened(directory) as journal:
            numbers = list(journal.replay.entries)
            assert numbers == list(range(len(numbers))) and len(numbers) >= 2
            assert [journal.read(number) for number in numbers] == [payload(number) for number in numbers]


def test_a_mark_that_finds_no_room_is_no_loss(tmp_path: Path) -> None:
    with opened(tmp_path / "a", "group") as journal:
        put(journal, 0)
    room = segments(tmp_path / "a")[-1].stat().st_size - MARK_BYTES // 2
    with opened(tmp_path / "b", "group") as journal:
        with file_size_limit(room):
            put(journal, 0)
        put(journal, 1)
        assert journal.read(0) == payload(0) and journal.read(1) == payload(1)
    with opened(tmp_path / "b") as journal:
        assert list(journal.replay.entries) == [0, 1] and journal.replay.torn_bytes == 0


def test_groups_of_more_segments_than_there_may_be_open_files_are_read(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(tmp_path) as journal:
        put_apart(journal, *range(300))
        assert len(segments(tmp_path)) >= 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
        try:
            for number in (*range(300), *range(300)):
                assert journal.read(number) == payload(number, SEGMENT_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_segment_ends_at_the_next_fsync_after_it_is_full(tmp_path: Path) -> None:
    """Not only when a batch is taken: a learner may be away for long."""
    with opened(tmp_path, "group") as journal:
        for number in range(50):
            put(journal, number, size=SEGMENT_BYTES // 4)
    assert max(path.stat().st_size for path in segments(tmp_path)) < 2 * SEGMENT_BYTES


def test_a_state_that_is_larger_than_a_segment_does_not_begin_one_with_every_sync(tmp_path: Path) -> None:
    with opened(tmp_path, "group") as journal:
        journal.state(QueueSnapshot(quarantined=tuple(range(10**6, 10**6 + 2000))))
        journal.sync()
        begun = len(segments(tmp_path))
        for number in range(20):
            put(journal, number)
        assert len(segments(tmp_path)) <= begun + 1


def test_damage_while_it_runs_is_found_when_the_group_is_read(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        put(journal, 7)
        path = segments(tmp_path)[-1]
        damaged(path, path.stat().st_size - 1)
        with pytest.raises(JournalError, match=rf"{path} is damaged: group 7"):
            journal.read(7)


def test_only_segments_with_nothing_live_are_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        put_apart(journal, *range(8))
        assert len(segments(tmp_path)) == 8
        journal.take(0, [1, 2])
        journal.take(1, [0, 3])
        journal.state(QueueSnapshot(committed_step=1), deletable=[1, 2])
        journal.sync()
        assert journal.read(0) == payload(0, SEGMENT_BYTES)
        assert len(segments(tmp_path)) == 9, "group 0, in the oldest segment, may still be asked for"
        journal.state(QueueSnapshot(committed_step=2), deletable=[0, 3])
        journal.sync()
        assert [path.stem for path in segments(tmp_path)] == ["000005", "000006", "000007", "000008", "000009"]
        assert [journal.read(number) for number in range(4, 8)] == [payload(n, SEGMENT_BYTES) for n in range(4, 8)]
        for gone in range(4):
            with pytest.raises(KeyError):
                journal.read(gone)
        assert journal.num_bytes == sum(path.stat().st_size for path in segments(tmp_path))
    with opened(tmp_path) as journal:
        assert list(journal.replay.entries) == [4, 5, 6, 7]
        assert journal.replay.state == QueueSnapshot(committed_step=2)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        put_apart(journal, 0, 1, 2)
    missing = segments(tmp_path)[1]
    missing.unlink()
    with pytest.raises(JournalError, match=rf"{missing} is missing"):
        Journal(tmp_path)


def test_a_second_hub_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(JournalError, match="in use by another hub"):
        Journal(tmp_path)
    with opened(tmp_path) as journal:
        assert journal.replay.entries == {}


def test_a_refused_journal_holds_no_lock(tmp_path: Path) -> None:
    with opened(tmp_path, "group") as journal:
        put(journal, 0, 1)
    path = segments(tmp_path)[0]
    whole = path.read_bytes()
    damaged(path, len(whole) // 2)
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path)
    path.write_bytes(whole)  # the operator restored it
    with opened(tmp_path) as journal:
        assert list(journal.replay.entries) == [0, 1]


def test_groups_that_were_taken_back_are_not_kept_for_the_next_hub(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        put(journal, *range(4))
        journal.take(0, [0, 1])
        journal.sync()
        # The hub dies before it has deleted anything; what its last state says is on disk.
        journal.state(QueueSnapshot(head=2, consumed=(), quarantined=(2,), removed=(1,)))
        journal.sync()
    with opened(tmp_path) as journal:
        assert sorted(journal.replay.entries) == [0, 3]
        for dead in (1, 2):
            with pytest.raises(KeyError):
                journal.read(dead)
