"""What an append leaves behind: all of it, or nothing that counts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.files import Appending, Disk, File


class Failing(Disk):
    """The operation that `fails` names does not succeed; a write takes half of what it is given."""

    def __init__(self) -> None:
        self.fails = ""
        self.done: list[str] = []

    def append(self, path: Path) -> File:
        return Halving(path, self.does)

    def sync(self, file: File) -> None:
        self.does("sync")

    def sync_path(self, path: Path) -> None:
        self.does("sync of the folder")

    def does(self, name: str) -> None:
        if name == self.fails:
            raise OSError(errno.ENOSPC, "no room")
        self.done.append(name)


class Halving(FileIO):
    def __init__(self, path: Path, does: Callable[[str], None]) -> None:
        super().__init__(path, "ab")
        self._does = does

    def write(self, data: Any, /) -> int:
        written = super().write(data[: max(1, len(data) // 2)])
        self._does("write")
        return written


@pytest.mark.parametrize("fails", ["write", "sync", "sync of the folder"])
def test_of_an_append_that_fails_nothing_is_left_when_the_next_is_made(fails: str, tmp_path: Path) -> None:
    files, path = Failing(), tmp_path / "file"
    file = Appending(path, files)
    files.fails = fails
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            file.append(b"lost\n")
    assert file.end == 0
    files.fails = ""
    file.append(b"first\n")
    assert "sync of the folder" in files.done, "the file's name is on disk too, although its first append failed"
    file.append(b"second\n")
    assert path.read_bytes() == b"first\nsecond\n" and file.end == path.stat().st_size
    assert files.done.count("sync of the folder") == 1
    file.close()


def test_what_lies_behind_the_end_is_removed_when_a_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"whole\nhal")
    file = Appending(path)
    file.cut(6)
    file.append(b"next\n", durable=False)
    assert path.read_bytes() == b"whole\nnext\n" and file.end == 11
    file.close()
