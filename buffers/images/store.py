"""The images of prompts in a directory, by digest: rows, messages and records carry digests, and who needs pixels opens them.

    DIRECTORY/<digest>   the file as it was given, once for equal images

The digest is of what is seen (`decoding`), so it is checked by whoever opens one, and a host that reads the same data has the
same digests. Any number of processes add and open; a process holds a few of the images.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path

from PIL import Image

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import DISK, File, lock_directory
from async_rlhf.buffers.images.decoding import MAX_BYTES, decoded, digest_of, size_of, thumbnail

_DIGEST = re.compile("[0-9a-f]{32}")
_SCRATCH = "async-rlhf-rows-"
RECENT = 4
"""Decoded images that a process keeps."""
_THUMBNAILS, _ADDED = 256, 4096
_MOST_SHOWN = 16 << 20


class ImageStore:
    """The images of this directory, which is made with the first. durable: whether what is added outlasts a loss of power, at
    some milliseconds each."""

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        self.directory, self._durable = directory, durable
        self._added: OrderedDict[bytes, str] = OrderedDict()

    def add(self, data: bytes) -> str:
        """Keep an image file; returns the digest. Raises ValueError as `decoded` does, OSError."""
        file = hashlib.blake2b(data, digest_size=16).digest()
        # An agent sends the images of its conversation with each call.
        if (known := self._added.get(file)) is not None and known in self:
            return known
        digest = self._added[file] = digest_of(decoded(data))
        while len(self._added) > _ADDED:
            self._added.popitem(last=False)
        self._put(digest, lambda path: path.write_bytes(data))
        return digest

    def take(self, digests: Iterable[str], source: ImageStore) -> None:
        """Keep those of another store. Raises OSError."""
        for digest in digests:
            self._put(digest, functools.partial(_link, source.path(digest)))

    def _put(self, digest: str, write: Callable[[Path], object]) -> None:
        if (path := self.path(digest)).is_file():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{os.getpid()}-{threading.get_ident()}")
        try:
            write(temporary)
            if self._durable:
                DISK.sync_path(temporary)
            temporary.replace(path)
            if self._durable:
                DISK.sync_path(self.directory)
        finally:
            temporary.unlink(missing_ok=True)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None and (self.directory / digest).is_file()

    def __iter__(self) -> Iterator[str]:
        """The digests of all."""
        with suppress(FileNotFoundError), os.scandir(self.directory) as files:
            yield from (file.name for file in files if _DIGEST.fullmatch(file.name))

    def path(self, digest: str) -> Path:
        """Where it lies. Raises DamagedError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise DamagedError(f"{digest[:80]!r} is no digest of an image: 32 hexadecimal digits were expected")
        return self.directory / digest

    def open(self, digest: str) -> Image.Image:
        """The image, mode RGB, the caller's own. Raises DamagedError when it is missing, or another."""
        return _recent(self.path(digest)).copy()

    def size(self, digest: str) -> tuple[int, int]:
        """(width, height), by the header alone. Raises DamagedError when it is missing, or none."""
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                return size_of(file)
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error

    def thumbnail(self, digest: str) -> bytes:
        """A JPEG of at most 96 pixels a side. Raises DamagedError as `open`, and for one of more than 16 Mi pixels."""
        path, (width, height) = self.path(digest), self.size(digest)
        if width * height > _MOST_SHOWN:
            raise _damaged(path, f"it is {width} x {height}, too large to be shown")
        return _thumbnail(path)

    def small(self, digest: str) -> Image.Image:
        """The image of `thumbnail`."""
        return Image.open(BytesIO(self.thumbnail(digest)))


@functools.cache
def scratch() -> ImageStore:
    """The store of this process for images of rows that no run keeps yet; it is gone with the process, or with the next one
    that has such a store."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{_SCRATCH}*"):
        with suppress(OSError), closing(lock_directory(left)):  # of a process that was killed
            shutil.rmtree(left)
    new = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}"))
    lock = lock_directory(new)
    directory = new.rename(root / new.name[1:])  # no other process that starts finds it without its lock
    atexit.register(_remove, directory, lock, os.getpid())
    return ImageStore(directory)


def _remove(directory: Path, lock: File, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()


@functools.lru_cache(RECENT)
def _recent(path: Path) -> Image.Image:
    try:
        with path.open("rb") as file:
            image = decoded(file.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if (found := digest_of(image)) != path.name:
        raise _damaged(path, f"its pixels have the digest {found}: it was changed, or this Pillow decodes it in another way")
    return image


@functools.lru_cache(_THUMBNAILS)
def _thumbnail(path: Path) -> bytes:
    return thumbnail(_recent(path))


def _link(there: Path, path: Path) -> None:
    try:
        os.link(there, path)
    except OSError:  # another disk, or one without links
        shutil.copyfile(there, path)


def _damaged(path: Path, what: object) -> DamagedError:
    return DamagedError(f"image {path} is missing or damaged: {what}. Restore it from a copy of the run's data")
