"""The queue's memory on disk: an append-only log of groups and decisions, replayed after a crash.

Never decides anything and knows no message format: payloads are bytes. Owned by one process (an exclusive lock says so).

A directory of segments `000001.log`, `000002.log`, … Each record is

    type (1 byte) | length (4 bytes, little endian) | CRC-32 of type, length and payload (4 bytes) | payload

and every segment begins with a STATE record, so that older segments can be deleted as soon as nothing in them is live.
What was appended is durable when `sync` returns. A torn record at the very end (the crash came while it was written, so
it was never acknowledged) is cut off on open. A bad record with a whole one behind it, in an older segment, or a missing
segment raises JournalError with file and offset: something that was acknowledged would be lost.
"""

from __future__ import annotations

import logging
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from buffers.errors import JournalError
from buffers.files import DISK, File, Files
from buffers.ledger import Entry, Restored

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<BII")
_STATE, _PUT, _TAKE = 1, 2, 3
_KINDS = re.compile(b"[\x01\x02\x03]")


@dataclass(frozen=True)
class _Place:
    segment: int
    offset: int  # of the payload
    length: int
    checksum: int


@dataclass
class Replay:
    """What a journal holds: the newest state, the groups put and not committed, and the batches made of them."""

    state: Restored = field(default_factory=Restored)
    entries: dict[int, Entry] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)
    torn_bytes: int = 0


class Journal:
    """Owns the segment files. Waits only for the disk. On close: syncs and releases the lock.

    Raises JournalError when the directory belongs to a running hub or holds a damaged record, and from every method when
    the disk does not do what it should.
    """

    def __init__(
        self, directory: Path, *, segment_bytes: int = 16 << 20, fsync: bool = True, keep: bool = False, files: Files = DISK
    ) -> None:
        files.make(directory)
        self._files, self._directory, self._segment_bytes = files, directory, segment_bytes
        self._fsync, self._keep = fsync, keep
        try:
            self._lock = files.lock(directory / "lock")
        except OSError as error:
            raise JournalError(f"{directory} is in use by another hub; stop that run first") from error
        self._places: dict[int, _Place] = {}  # group number -> payload
        self._takes: dict[int, int] = {}  # step -> segment
        self._readers: dict[int, File] = {}
        try:
            self.replay = self._read()
            self._segment = max(self._segments(), default=0)
            self._file = self._begin_segment(self.replay.state)
        except JournalError:
            self._lock.close()
            raise

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, number: int, entry: Entry, payload: bytes) -> None:
        """Append a group; durable after `sync`."""
        head = msgpack.packb([number, entry.attempt, entry.oldest_version, entry.newest_version, entry.num_tokens])
        offset = self._append(_PUT, struct.pack("<I", len(head)) + head + payload)
        self._places[number] = _Place(self._segment, offset + 4 + len(head), len(payload), zlib.crc32(payload))

    def take(self, step: int, numbers: Iterable[int]) -> None:
        """Append the make-up of batch `step`; durable after `sync`."""
        self._append(_TAKE, msgpack.packb([step, list(numbers)]))
        self._takes[step] = self._segment

    def state(self, state: Restored, deletable: Iterable[int] = ()) -> None:
        """Append the queue's state, make it durable, and only then delete segments that hold nothing live."""
        self._append(_STATE, msgpack.packb(asdict(state)))
        self.sync()
        for number in deletable:
            self._places.pop(number, None)
        for step in [step for step in self._takes if step < state.committed_step]:
            del self._takes[step]
        if self._file.tell() > self._segment_bytes:
            self._file.close()
            self._file = self._begin_segment(state)
        if self._keep:
            return
        live = {place.segment for place in self._places.values()} | set(self._takes.values()) | {self._segment}
        for segment in self._segments():  # oldest first, so that a crash meanwhile leaves no gap
            if segment < min(live):
                if segment in self._readers:
                    self._readers.pop(segment).close()
                self._files.unlink(self._path(segment))

    def sync(self) -> None:
        """Make everything appended so far durable (one fsync however much that is)."""
        with self._disk():
            self._file.flush()
            if self._fsync:
                self._files.sync(self._file)

    def read(self, number: int) -> bytes:
        """The payload of a group that was put and not deleted. Raises KeyError for any other."""
        place = self._places[number]
        with self._disk():
            if place.segment == self._segment:
                self._file.flush()
            reader = self._readers.get(place.segment)
            if reader is None:
                reader = self._readers[place.segment] = self._files.reader(self._path(place.segment))
            payload = self._files.read_at(reader, place.length, place.offset)
        if zlib.crc32(payload) != place.checksum:
            raise JournalError(
                f"{self._path(place.segment)} is damaged: group {number}, {place.length} bytes from byte {place.offset} on, "
                "is not what was written. Restore the file, or start a new run directory."
            )
        return payload

    @property
    def num_bytes(self) -> int:
        """Size of all segments on disk."""
        return sum(self._files.size(self._path(segment)) for segment in self._segments())

    def close(self) -> None:
        try:
            if not self._file.closed:
                self.sync()
        finally:
            with self._disk():
                for reader in self._readers.values():
                    reader.close()
                self._lock.close()
                self._file.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalError(
                f"{self._directory} cannot be written or read: {error}. Nothing acknowledged is lost; "
                "free space or mend the disk, then resume the run."
            ) from error

    def _append(self, kind: int, payload: bytes) -> int:
        with self._disk():
            offset = self._file.tell() + _HEAD.size
            self._file.write(_record(kind, payload))
        return offset

    def _begin_segment(self, state: Restored) -> File:
        self._segment += 1
        with self._disk():
            file = self._files.append(self._path(self._segment))
            file.write(_record(_STATE, msgpack.packb(asdict(state))))
            file.flush()
            if self._fsync:
                self._files.sync(file)
                self._files.sync_path(self._directory)
        return file

    def _segments(self) -> list[int]:
        return sorted(int(name[:-4]) for name in self._files.names(self._directory) if name.endswith(".log"))

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06d}.log"

    def _read(self) -> Replay:
        replay = Replay()
        segments = self._segments()
        for segment in segments:
            path = self._path(segment)
            if segment - 1 not in (segments[0] - 1, *segments):
                raise JournalError(f"{self._path(segment - 1)} is missing: the groups in it would be lost. Restore it.")
            data = self._files.read(path)
            good = 0
            while good < len(data):
                record = _parse(data, good)
                if record is None:
                    behind = _next_record(data, good + 1)
                    if segment != segments[-1] or behind is not None:
                        lost = f"bytes {good} to {len(data) if behind is None else behind} of {len(data)}"
                        raise JournalError(
                            f"{path} is damaged at byte {good}: the groups and batches in {lost} cannot be read. "
                            "Restore the file, or start a new run directory."
                        )
                    replay.torn_bytes = len(data) - good
                    _log.warning("%s: cut off %d bytes of an unfinished write", path, replay.torn_bytes)
                    self._files.truncate(path, good)
                    break
                kind, payload = record
                self._apply(replay, kind, payload, segment, good + _HEAD.size)
                good += _HEAD.size + len(payload)
            if segment == segments[-1]:
                # Durable before a later segment exists: torn bytes, or a tail that a hub left unsynced when its disk was
                # full and the machine loses next, would be damage in an older one.
                self._files.sync_path(path)
        return replay

    def _apply(self, replay: Replay, kind: int, payload: bytes, segment: int, offset: int) -> None:
        if kind == _PUT:
            (length,) = struct.unpack_from("<I", payload)
            number, *entry = msgpack.unpackb(payload[4 : 4 + length])
            replay.entries[number] = Entry(*entry)
            group = payload[4 + length :]
            self._places[number] = _Place(segment, offset + 4 + length, len(group), zlib.crc32(group))
        elif kind == _TAKE:
            step, numbers = msgpack.unpackb(payload)
            replay.batches[step] = numbers
            self._takes[step] = segment
        else:
            fields: dict[str, Any] = msgpack.unpackb(payload, use_list=False)
            replay.state = Restored(**fields)
            for step in [step for step in replay.batches if step < replay.state.committed_step]:
                self._takes.pop(step)
                for number in replay.batches.pop(step):
                    replay.entries.pop(number, None)
                    self._places.pop(number, None)


@dataclass(frozen=True)
class Put:
    """A group that was put."""

    number: int
    payload: bytes


@dataclass(frozen=True)
class Take:
    """The make-up of a batch."""

    step: int
    numbers: list[int]


def records(directory: Path) -> Iterator[Put | Take]:
    """Puts and takes in the order in which they were written, up to the first record that is not whole. Only reads.

    Raises JournalError when there is no journal, or a segment other than the newest is damaged.
    """
    paths = sorted(directory.glob("[0-9]*.log"))
    if not paths:
        raise JournalError(f"{directory} holds no journal")
    for path in paths:
        data, at = path.read_bytes(), 0
        while (record := _parse(data, at)) is not None:
            kind, payload = record
            at += _HEAD.size + len(payload)
            if kind == _PUT:
                (length,) = struct.unpack_from("<I", payload)
                yield Put(msgpack.unpackb(payload[4 : 4 + length])[0], payload[4 + length :])
            elif kind == _TAKE:
                yield Take(*msgpack.unpackb(payload))
        if at < len(data) and path != paths[-1]:
            raise JournalError(f"{path} is damaged at byte {at}: what follows in it cannot be read")


def _record(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, len(payload), _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<BI", kind, len(payload))))


def _parse(data: bytes, at: int) -> tuple[int, bytes] | None:
    """The record at byte `at`, or None when it is cut short or damaged."""
    if at + _HEAD.size > len(data):
        return None
    kind, length, checksum = _HEAD.unpack_from(data, at)
    if kind not in (_STATE, _PUT, _TAKE) or at + _HEAD.size + length > len(data):
        return None
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    if _checksum(kind, payload) != checksum:
        return None
    return kind, payload


def _next_record(data: bytes, start: int) -> int | None:
    """Where the next whole record begins, or None when nothing behind `start` is one."""
    for match in _KINDS.finditer(data, start):
        if _parse(data, match.start()) is not None:
            return match.start()
    return None
