"""The format of a journal's segment files: one record after another, and how they are found again. Owns no file.

A record is

    type (1 byte) | length of the payload (4 bytes) | xxh3-64 of type, length and payload (8 bytes) | payload

integers little endian. The payload of a PUT is a length (4 bytes), a MessagePack list [number, attempt, oldest version,
newest version, tokens] of that length, and the group's bytes; of a TAKE the list [step, numbers]; of a STATE the fields of
`ledger.QueueSnapshot` and the number of the format; of a MARK an offset (8 bytes): every byte of the segment before it was on
disk when it was written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from async_rlhf.buffers.errors import DamagedError, JournalError
from async_rlhf.buffers.files import JOURNAL
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry

HEAD = struct.Struct("<BIQ")
STATE, PUT, TAKE, MARK = 1, 2, 3, 4
_LENGTH, _OFFSET = struct.Struct("<I"), struct.Struct("<Q")
_KINDS = re.compile(b"[\x01\x02\x03\x04]")


@dataclass(frozen=True)
class PutRecord:
    """A group that was put. `start`: where its bytes begin in the record's payload."""

    number: int
    entry: Entry
    payload: bytes
    start: int


@dataclass(frozen=True)
class TakeRecord:
    """The make-up of a batch."""

    step: int
    numbers: list[int]


@dataclass(frozen=True)
class Mark:
    """All bytes before `offset` were durable."""

    offset: int


Record = PutRecord | TakeRecord | QueueSnapshot | Mark


def put_head(number: int, entry: Entry) -> bytes:
    """The part of a record's payload before the group's bytes."""
    fields = (number, entry.attempt, entry.oldest_version, entry.newest_version, entry.num_tokens, entry.num_bytes)
    head: bytes = msgpack.packb(fields)
    return _LENGTH.pack(len(head)) + head


def take_payload(step: int, numbers: Sequence[int]) -> bytes:
    packed: bytes = msgpack.packb([step, list(numbers)])
    return packed


def state_payload(state: QueueSnapshot) -> bytes:
    packed: bytes = msgpack.packb({"format": JOURNAL.newest, **asdict(state)})
    return packed


def mark(offset: int) -> bytes:
    """A whole record."""
    payload = _OFFSET.pack(offset)
    return head(MARK, [payload]) + payload


def head(kind: int, parts: Sequence[bytes]) -> bytes:
    """The first bytes of a record whose payload is these parts, one after the other."""
    length = sum(map(len, parts))
    return HEAD.pack(kind, length, _checksum(kind, length, parts))


def is_whole(record: bytes) -> bool:
    """Whether these bytes are one record, as it was written."""
    if len(record) < HEAD.size:
        return False
    kind, length, expected = HEAD.unpack_from(record)
    payload = memoryview(record)[HEAD.size :]
    return bool(len(payload) == length and _checksum(kind, length, [payload]) == expected)


def parse(data: bytes, at: int) -> tuple[Record, int] | None:
    """The record at byte `at` and where the next one begins, or None when it is cut short or damaged.

    Raises FormatError for a state of another format, which every segment begins with.
    """
    if at + HEAD.size > len(data):
        return None
    kind, length, expected = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    if kind not in (STATE, PUT, TAKE, MARK) or end > len(data):
        return None
    payload = data[at + HEAD.size : end]
    return (_record(kind, payload), end) if _checksum(kind, length, [payload]) == expected else None


def records_of(data: bytes) -> Iterator[tuple[Record, int, int]]:
    """The records of a segment with where each begins and ends, up to the first that is not whole."""
    at = 0
    while (found := parse(data, at)) is not None:
        yield found[0], at, found[1]
        at = found[1]


def whole_records(data: bytes, start: int) -> Iterator[tuple[int, Record]]:
    """The whole records from byte `start` on, with their places; other bytes between them are skipped."""
    at = start
    while (match := _KINDS.search(data, at)) is not None:
        at = match.start()
        if (parsed := parse(data, at)) is None:
            at += 1
        else:
            yield at, parsed[0]
            at = parsed[1]


def records(directory: Path) -> Iterator[PutRecord | TakeRecord]:
    """Puts and takes in the order in which they were written, up to the first record that is not whole. Only reads.

    Raises JournalError when there is no journal, or a segment other than the newest is damaged.
    """
    paths = sorted(directory.glob("[0-9]*.log"))
    if not paths:
        raise JournalError(f"{directory} holds no journal")
    for path in paths:
        data, read = path.read_bytes(), 0
        for record, _, end in records_of(data):
            read = end
            if isinstance(record, PutRecord | TakeRecord):
                yield record
        if read < len(data) and path != paths[-1]:
            raise DamagedError(f"{path} is damaged at byte {read}: what follows in it cannot be read")


def _checksum(kind: int, length: int, parts: Sequence[bytes | memoryview]) -> int:
    digest = xxhash.xxh3_64(HEAD.pack(kind, length, 0))
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _record(kind: int, payload: bytes) -> Record:
    if kind == PUT:
        start = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
        number, *entry = msgpack.unpackb(payload[_LENGTH.size : start])
        return PutRecord(number, Entry(*entry), payload[start:], start)
    if kind == TAKE:
        return TakeRecord(*msgpack.unpackb(payload))
    if kind == MARK:
        return Mark(*_OFFSET.unpack(payload))
    fields: dict[str, Any] = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
    JOURNAL.check(fields.pop("format", 1))
    return QueueSnapshot(**fields)
