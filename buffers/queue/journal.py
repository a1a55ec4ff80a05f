"""The queue's memory on disk: an append-only log of groups and decisions, replayed after a crash.

Never decides anything and reads no message: payloads are bytes. Owned by one process (by an exclusive lock).
A directory of segments `000001.log`, `000002.log`, …; what they look like inside is `segment`'s. Every segment begins with
a STATE record, so that older segments can be deleted as soon as nothing in them is live.

What is promised when `sync` returns, by `fsync`:

    group      everything appended is on disk: neither a process that dies nor a machine that loses power loses it. One
               fsync, however much that is
    off        everything appended is with the operating system, so that no process that dies loses it; nothing is promised
               when the power fails

After each fsync a mark is appended: up to which byte the segment is on disk. What is no whole record on open is cut
off, with all behind it, where no mark vouches for it: a disk writes the pages of an unfinished round in any order. Before a
mark, in an older segment, or where a segment is missing it is damage (DamagedError, with file and offset): something that
was acknowledged would be lost.

A full disk raises DiskFullError from `sync`, and changes nothing: what was appended stays in memory, and the
next call cuts off what was half written and writes all of it again. So what was written before `sync` returned is on disk.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from async_rlhf.buffers.config import Fsync
from async_rlhf.buffers.errors import DamagedError, DiskFullError, FormatError, JournalError
from async_rlhf.buffers.files import DISK, FULL, Appending, Disk, File
from async_rlhf.buffers.queue import segment
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry

_log = logging.getLogger(__name__)
# Parts smaller than this are joined before they are written: a system call costs as much as copying some kilobytes.
_SMALL = 1 << 16
_MAX_READERS = 64  # files that are open at a time to read groups from


@dataclass(frozen=True)
class _RecordPlace:
    """The place of a group's record, and of the group's bytes in it."""

    segment: int
    offset: int
    length: int
    start: int


@dataclass
class JournalReplay:
    """The content of a journal: the newest state, the uncommitted groups, and the batches made of them."""

    state: QueueSnapshot = field(default_factory=QueueSnapshot)
    entries: dict[int, Entry] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)
    torn_bytes: int = 0


class Journal:
    """Owns the segment files. Waits only for the disk. On close: syncs and releases the lock.

    Raises JournalError when the directory belongs to a running hub or holds a damaged record, FormatError when another version
    has written it, and JournalError from every method when the disk does not do what it should; of those DiskFullError can be
    waited out.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 16 << 20,
        fsync: Fsync = "group",
        keep: bool = False,
        files: Disk = DISK,
    ) -> None:
        self._files, self._directory, self._segment_bytes = files, directory, segment_bytes
        self._fsync, self._keep = fsync, keep
        self._places: dict[int, _RecordPlace] = {}  # group number -> where its bytes are
        self._takes: dict[int, int] = {}  # step -> segment
        self._live: Counter[int] = Counter()  # segment -> places and takes in it
        self._readers: dict[int, File] = {}  # of segments, the one used last at the end
        self._pending: list[bytes] = []  # appended and not promised yet
        self._end = 0  # of the present segment, pending bytes included
        self._promised = False  # a state was appended: what it gives up can be deleted once it is written
        try:
            with self.disk():
                files.make(directory)
                self._lock = files.lock(directory / "lock")
        except BlockingIOError as error:
            raise JournalError(f"{directory} is in use by another hub; stop that run first") from error
        try:
            with self.disk():
                self.replay = self._read()
        except (JournalError, FormatError):
            self._lock.close()
            raise
        self._state = segment.state_payload(self.replay.state)  # the newest
        self._file = self._begin_segment()

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, number: int, entry: Entry, *payload: bytes) -> None:
        """Append a group, its bytes in parts; promised after `sync`."""
        head = segment.put_head(number, entry)
        offset = self._append(segment.PUT, head, *payload)
        self._remember(number, _RecordPlace(self._segment, offset, self._end - offset, segment.HEAD.size + len(head)))

    def take(self, step: int, numbers: Iterable[int]) -> None:
        """Append the make-up of batch `step`; promised after `sync`."""
        self._append(segment.TAKE, segment.take_payload(step, list(numbers)))
        self._takes[step] = self._segment
        self._live[self._segment] += 1

    def state(self, state: QueueSnapshot, deletable: Iterable[int] = ()) -> None:
        """Append the queue's state; promised after `sync`, which then deletes segments that hold nothing live."""
        self._promised = True
        for number in deletable:
            self._forget(number)
        for step in [step for step in self._takes if step < state.committed_step]:
            self._live[self._takes.pop(step)] -= 1
        self._state = segment.state_payload(state)
        self._append(segment.STATE, self._state)

    def sync(self) -> None:
        """Keep the promise of the module docstring for everything appended so far."""
        if not self._pending:
            return
        durable = self._fsync == "group"
        with self.disk():
            self._file.append(*_chunks(self._pending), durable=durable)
        self._pending.clear()
        promised, self._promised = self._promised, False
        if promised:
            self._tidy()
        if self._end > max(self._segment_bytes, 2 * self._head_bytes):
            self._file.close()
            self._file = self._begin_segment()
        elif durable:
            # The mark vouches for the bytes on disk. It is not synced itself: without it fewer bytes are vouched for.
            with suppress(OSError):
                self._file.append(segment.mark(self._end), durable=False)
            self._end = self._file.end

    def read(self, number: int) -> memoryview:
        """The bytes of a group that was put and not deleted, once `sync` has returned. Raises KeyError for any other."""
        place = self._places[number]
        with self.disk():
            reader = self._readers.pop(place.segment, None) or self._files.reader(self._path(place.segment))
            self._readers[place.segment] = reader
            if len(self._readers) > _MAX_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            record = self._files.read_at(reader, place.length, place.offset)
        if not segment.is_whole(record):
            raise DamagedError(
                f"{self._path(place.segment)} is damaged: group {number}, {place.length} bytes from byte {place.offset} on, "
                "is not what was written. Restore the file, or start a new run directory."
            )
        return memoryview(record)[place.start :]

    @property
    def num_bytes(self) -> int:
        """Size of all segments on disk."""
        with self.disk():
            return self._file.end + sum(self._files.size(self._path(number)) for number in self._segments[:-1])

    def close(self) -> None:
        try:
            self.sync()
        finally:
            with self.disk():
                for file in (*self._readers.values(), self._lock):
                    file.close()
                self._file.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def disk(self) -> Iterator[None]:
        """Turn an OSError into a JournalError, or DiskFullError for a full disk, which can be waited out."""
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            waits = error.errno in FULL
            raise (DiskFullError if waits else JournalError)(
                f"{self._directory} cannot be written or read: {error}. Nothing acknowledged is lost; "
                + ("the hub goes on when there is room." if waits else "free space or mend the disk, then resume the run.")
            ) from error

    def _begin_segment(self) -> Appending:
        """Go on in another segment. The one before is durable and is not written to again."""
        self._segment += 1
        self._segments.append(self._segment)
        self._end = 0
        self._append(segment.STATE, self._state)
        self._head_bytes = self._end  # a large state is not all that a segment holds, else every sync would begin another
        return Appending(self._path(self._segment), self._files)

    def _append(self, kind: int, *parts: bytes) -> int:
        """Append a record; returns its offset."""
        offset, head = self._end, segment.head(kind, parts)
        self._pending += (head, *parts)
        self._end += len(head) + sum(map(len, parts))
        return offset

    def _tidy(self) -> None:
        """Everything is durable: delete segments older than what is live, the oldest first, so that a crash leaves no gap."""
        first = min((number for number, count in self._live.items() if count), default=self._segment)
        with self.disk():
            while not self._keep and self._segments[0] < first:
                if self._segments[0] in self._readers:
                    self._readers.pop(self._segments[0]).close()
                self._files.unlink(self._path(self._segments[0]))
                del self._live[self._segments.pop(0)]

    def _remember(self, number: int, place: _RecordPlace) -> None:
        self._forget(number)
        self._places[number] = place
        self._live[place.segment] += 1

    def _forget(self, number: int) -> None:
        place = self._places.pop(number, None)
        if place is not None:
            self._live[place.segment] -= 1

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.log"

    def _read(self) -> JournalReplay:
        replay = JournalReplay()
        names = self._files.names(self._directory)
        self._segments = sorted(int(name[:-4]) for name in names if name.endswith(".log"))
        self._segment = max(self._segments, default=0)
        for number in self._segments:
            path = self._path(number)
            if number - 1 not in (self._segments[0] - 1, *self._segments):
                raise DamagedError(f"{self._path(number - 1)} is missing: the groups in it would be lost. Restore it.")
            data, good = self._files.read(path), 0
            for record, begin, good in segment.records_of(data):
                self._apply(replay, record, number, begin, good - begin)
            if good < len(data):
                self._cut_off(replay, number, data, good)
            if number == self._segments[-1]:
                # Durable before a later segment exists: torn bytes, or a tail that a hub left unsynced when its disk was
                # full and the machine loses next, would be damage in an older one.
                self._files.sync_path(path)
        return replay

    def _cut_off(self, replay: JournalReplay, number: int, data: bytes, good: int) -> None:
        """Cut off an unfinished write behind byte `good`. Raises DamagedError when the bytes there had been made durable."""
        path, behind = self._path(number), list(segment.whole_records(data, good + 1))
        if number != self._segments[-1] or any(isinstance(each, segment.Mark) and each.offset > good for _, each in behind):
            lost = f"bytes {good} to {behind[0][0] if behind else len(data)} of {len(data)}"
            raise DamagedError(
                f"{path} is damaged at byte {good}: the groups and batches in {lost} cannot be read. "
                "Restore the file, or start a new run directory."
            )
        replay.torn_bytes = len(data) - good
        _log.warning("%s: cut off %d bytes of an unfinished write", path, replay.torn_bytes)
        self._files.truncate(path, good)

    def _apply(self, replay: JournalReplay, record: segment.Record, number: int, offset: int, length: int) -> None:
        match record:
            case segment.PutRecord():
                replay.entries[record.number] = record.entry
                self._remember(record.number, _RecordPlace(number, offset, length, segment.HEAD.size + record.start))
            case segment.TakeRecord():
                replay.batches[record.step] = record.numbers
                self._takes[record.step] = number
                self._live[number] += 1
            case QueueSnapshot():
                replay.state = record
                for step in [step for step in replay.batches if step < record.committed_step]:
                    self._live[self._takes.pop(step)] -= 1
                    for committed in replay.batches.pop(step):
                        replay.entries.pop(committed, None)
                        self._forget(committed)
                for dead in (*record.quarantined, *record.removed):
                    replay.entries.pop(dead, None)
                    self._forget(dead)


def _chunks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer pieces."""
    small: list[bytes] = []
    for part in parts:
        if len(part) < _SMALL:
            small.append(part)
        else:
            yield b"".join(small)
            small.clear()
            yield part
    yield b"".join(small)
