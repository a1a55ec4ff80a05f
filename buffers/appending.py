"""A file that one process appends to: an append is in it whole, or what is left of it is cut off before the next."""

from __future__ import annotations

from pathlib import Path

from async_rlhf.buffers.files import DISK, File, Files


class Appending:
    """Owns the file, which is made with the first append. end: bytes that count. Raises OSError, as the file system does."""

    def __init__(self, path: Path, files: Files = DISK) -> None:
        self._path, self._files = path, files
        self.end = 0
        self._file: File | None = None
        self._torn = False  # there may be something behind the end

    def cut(self, end: int) -> None:
        """Of a file that is there: its first `end` bytes count, the rest is removed."""
        self.end = end
        if end < self._files.size(self._path):
            self._files.truncate(self._path, end)

    def append(self, data: bytes, *, durable: bool = True) -> None:
        """With the operating system when it returns; durable: on disk. Where it raises, nothing of this counts."""
        if self._file is None:
            self._file = self._files.append(self._path)
        if self._torn:
            self._files.truncate(self._path, self.end)
        self._torn = True
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        if durable:
            self._files.sync(self._file)
            if not self.end:
                self._files.sync_path(self._path.parent)
        self._torn = False
        self.end += len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
