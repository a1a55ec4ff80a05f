"""The disk as the journal and the weight store see it, the seam that a simulator replaces with one that tears and fills up; and
the numbers of what lies on it.

Nothing here decides what is written or when it must be durable. Every method raises OSError as the operating system does.

This code reads up to its own number, and refuses what a newer one has written:

    what            number                                     lies in
    run directory   RUN: also of the small files in it         manifest.json
    journal         JOURNAL                                    the STATE record that every segment begins with
    group in it     `protocol/packing.py`, _OLDEST_PUT         its first frame
    weight set      WEIGHTS                                    the head of its file
    checkpoint      `learner/checkpoint/store.py`, SCHEMA      state.json
    queue of runs   QUEUE                                      state.json of each of its runs

What has no number is of format 1. A number is raised with a change after which older code would misread what is written, and
RUN with each of those above QUEUE: so a run directory is refused as a whole, by its manifest, before anything in it is touched.
`oldest` is raised with a change after which this code would misread what was written. A sample of each format is kept under
`tests/formats`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from async_rlhf.buffers.errors import FormatError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk."""
_AT_A_TIME = 8
LOCK = ".lock"


class File(Protocol):
    """An open file; what was written is durable after `Disk.sync`."""

    def write(self, data: bytes | memoryview, /) -> int: ...
    def flush(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Disk:
    """The operating system's files. A name that was made, replaced or removed is durable after `sync_path` of its directory."""

    def make(self, directory: Path) -> None:
        """Make a directory with its parents; durable when it returns."""
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for each in missing:
            self.sync_path(each.parent)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def is_readable(self, path: Path) -> bool:
        """Whether it is a regular file, no link to one, that this process may read."""
        return path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)

    def lock(self, path: Path) -> File:
        """Held until the file is closed; raises OSError when another process holds it. A link of this name is not followed."""
        file = self.create(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file

    def create(self, path: Path, private: bool = False) -> File:
        """private: this user alone may read it. A link of this name is not followed."""
        mode = 0o600 if private else 0o666
        file = open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode))  # noqa: SIM115  its caller's
        if private:
            os.fchmod(file.fileno(), mode)  # one that was there before keeps its mode
        return file

    def append(self, path: Path) -> File:
        """Unbuffered: a write may take less than it is given, and nothing waits in this process."""
        return path.open("ab", buffering=0)

    def reader(self, path: Path) -> File:
        """A link is not followed, and nothing is waited for."""
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))

    def read_at(self, file: File, length: int, offset: int) -> bytes:
        return os.pread(file.fileno(), length, offset)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def sync(self, file: File) -> None:
        os.fsync(file.fileno())

    def sync_path(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def replace(self, path: Path, new: Path) -> None:
        path.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def unlink_all(self, paths: Sequence[Path]) -> None:
        """Remove files in any order, several at a time: a file system may wait milliseconds to free the blocks of each."""
        if len(paths) <= _AT_A_TIME:
            for path in paths:
                self.unlink(path)
            return
        from concurrent.futures import ThreadPoolExecutor  # its `queue` would be a user's file of that name, read at import

        with ThreadPoolExecutor(_AT_A_TIME, "unlink") as pool:
            list(pool.map(self.unlink, paths))


DISK = Disk()


def lock_directory(path: Path) -> File:
    """Holds the directory's lock until it is closed. Raises OSError, also while another process holds it.

    The lock is on a file in it: network file systems lock only what is open for writing, which no directory can be.
    """
    return DISK.lock(path / LOCK)


def content_digest(path: Path) -> str:
    """xxh3_128 of a file's content, 32 hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_whole(path: Path, *data: bytes | memoryview | str, files: Disk = DISK, private: bool = False) -> None:
    """Replace a file, given in parts: after a crash or on a full disk it holds the old bytes or the new, never a part of them.

    private: this user alone may read it. Durable when it returns. Raises OSError; the file is then as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        file = files.create(temporary, private)
        try:
            for part in data:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            files.sync(file)
        finally:
            file.close()
        files.replace(temporary, path)
        files.sync_path(path.parent)
    except OSError:
        with suppress(OSError):
            files.unlink(temporary)
        raise


class Appending:
    """A file that one process appends to: an append is in it whole, or what is left of it is cut off before the next.

    Owns the file, which is made with the first append. end: bytes that count. Raises OSError, as the file system does.
    """

    def __init__(self, path: Path, files: Disk = DISK) -> None:
        self._path, self._files = path, files
        self.end = 0
        self._file: File | None = None
        self._named = False  # its name is durable
        self._torn = False  # there may be something behind the end

    def cut(self, end: int) -> None:
        """Keep the first `end` bytes of an existing file and remove the rest."""
        self.end = end
        if end < self._files.size(self._path):
            self._files.truncate(self._path, end)

    def append(self, *parts: bytes, durable: bool = True) -> None:
        """Append; the operating system has the bytes then, with `durable` the disk. After an error none of them count."""
        if self._file is None:
            self._file = self._files.append(self._path)
        if self._torn:
            self._files.truncate(self._path, self.end)
        self._torn = True
        for part in parts:
            left = memoryview(part)
            while left:  # a disk that is nearly full takes less than it is given
                left = left[self._file.write(left) :]
        if durable:
            self._files.sync(self._file)
            if not self._named:
                self._files.sync_path(self._path.parent)
                self._named = True
        self._torn = False
        self.end += sum(map(len, parts))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Format:
    what: str
    newest: int
    """The format that this code writes."""
    oldest: int = 1
    """The oldest format that it reads."""

    def check(self, number: object, path: Path | None = None) -> None:
        """Raises FormatError for a number that this code does not read."""
        if type(number) is int and self.oldest <= number <= self.newest:
            return
        older = type(number) is int and number < self.oldest
        reads = f"{self.oldest} to {self.newest}" if self.oldest < self.newest else f"{self.newest}"
        raise FormatError(
            f"{'' if path is None else f'{path}: '}{self.what} of format {number!r}, this version of async-rlhf reads {reads}. "
            f"Nothing was changed; use {'an older' if older else 'a newer'} version, or another directory"
        )


RUN = Format("a run directory", 4)
JOURNAL = Format("a journal", 3)
WEIGHTS = Format("a weight set", 1)
QUEUE = Format("an entry of a queue of runs", 1)


def written(size: int) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 100 << 20 else f"{size / (1 << 20):.0f} MiB"
