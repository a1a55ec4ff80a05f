"""What a producer brings in: whole or not at all, within limits, and never after the end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError, SpoolError
from async_rlhf.buffers.files import DISK, Disk
from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.deposit import END, Deposited, end, put
from async_rlhf.buffers.spool.stream import Stream


class RefusingDisk(Disk):
    """Does everything but one thing in one directory, as long as it has a reason not to."""

    def __init__(self, operation: str, directory: Path, reason: int) -> None:
        self._operation, self._directory, self.reason = operation, directory, reason

    def create(self, path: Path, private: bool = False) -> Any:
        self._refuse("create", path)
        return super().create(path, private)

    def append(self, path: Path) -> Any:
        self._refuse("append", path)
        return super().append(path)

    def sync(self, file: Any) -> None:
        self._refuse("sync", Path(file.name))
        super().sync(file)

    def replace(self, path: Path, new: Path) -> None:
        self._refuse("replace", path)
        super().replace(path, new)

    def _refuse(self, operation: str, path: Path) -> None:
        if self.reason and operation == self._operation and path.parent == self._directory:
            raise OSError(self.reason, os.strerror(self.reason), str(path))


@contextmanager
def running(folder: Path, files: Disk = DISK) -> Iterator[Spool]:
    """A run that takes every row of `spool` as it is."""
    with closing(Stream(folder / "run", files=files)) as stream:
        yield Spool(folder / "spool", folder / "run", stream, lambda lines: [line.decode() for line in lines], files)


def claim_all(spool: Spool) -> None:
    while spool.turn():
        pass


def test_rows_come_in_under_names_that_are_claimed_in_their_order(tmp_path: Path) -> None:
    first = put(tmp_path, [b'{"prompt": "a"}\n', b"\n", b'{"prompt": "b"}'])
    second = put(tmp_path, iter([b'{"prompt": "c"}']))
    assert (first.rows, first.num_bytes) == (2, 32) and sorted(os.listdir(tmp_path)) == [first.file, second.file]
    assert (tmp_path / first.file).read_bytes() == b'{"prompt": "a"}\n{"prompt": "b"}\n'
    assert put(tmp_path, [b"  \n"]) == Deposited(0, 0, "") and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([b'{"prompt": "a"}', b'{"prompt"'], "line 2 is not JSON"),
        ([b'{"prompt": "a"}', b"[1]"], "line 2 is a list, not an object"),
        ([b"[" * 5000], "line 1"),
        ([b'{"prompt": "%b"}' % (b"a" * 100)], "line 1 has 114 bytes, the limit of a row is 100"),
        ([b'{"prompt": "%b"}' % (b"a" * 50)] * 4, "the rows to line 4 have 260 bytes, the limit is 200"),
    ],
)
def test_of_lines_that_cannot_be_rows_or_are_too_many_none_comes_in(lines: list[bytes], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        put(tmp_path, lines, max_row_bytes=100, max_bytes=200)
    assert os.listdir(tmp_path) == []


def test_nothing_comes_in_behind_the_end_or_where_there_is_no_spool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory; a run makes its own when it starts"):
        put(tmp_path / "none", [b"{}"])
    end(tmp_path)
    end(tmp_path)
    with pytest.raises(ConfigError, match=f"has ended: it holds a file {END}"):
        put(tmp_path, [b"{}"])


@pytest.mark.parametrize(("operation", "reason"), [("create", errno.EROFS), ("sync", errno.ENOSPC), ("replace", errno.EDQUOT)])
def test_a_full_or_read_only_spool_takes_all_rows_or_none_and_says_why(operation: str, reason: int, tmp_path: Path) -> None:
    disk = RefusingDisk(operation, tmp_path, reason)
    with pytest.raises(SpoolError, match=rf"cannot be written: .*{os.strerror(reason)}.*; nothing was put into it"):
        put(tmp_path, [b'{"prompt": "a"}'], files=disk)
    assert os.listdir(tmp_path) == []
    disk.reason = 0
    assert put(tmp_path, [b'{"prompt": "a"}'], files=disk).rows == 1


@pytest.mark.parametrize(
    ("operation", "where", "reason"),
    [("replace", "spool", errno.EROFS), ("replace", "spool", errno.EACCES), ("append", "run", errno.ENOSPC)],
)
def test_a_run_names_a_spool_or_a_disk_that_takes_nothing_and_goes_on_when_it_does(
    operation: str, where: str, reason: int, tmp_path: Path
) -> None:
    source = tmp_path / "spool"
    source.mkdir()
    put(source, [b'{"prompt": "a"}'])
    disk = RefusingDisk(operation, tmp_path / where, reason)
    with running(tmp_path, disk) as spool:
        for _ in range(3):
            assert not spool.turn() and os.strerror(reason) in spool.status()["problem"], "it is tried again, and not at once"
        assert spool.stream.num_rows == 0
        disk.reason = 0
        claim_all(spool)
        assert spool.status() == {"rows": 1, "rejected": 0, "ended": False, "problem": ""} and os.listdir(source) == []


def test_a_spool_that_is_away_is_named_until_it_is_back_and_what_is_no_file_stays_in_it(tmp_path: Path) -> None:
    source = tmp_path / "spool"
    with running(tmp_path) as spool:
        assert not spool.turn() and "No such file or directory" in spool.status()["problem"]
        source.mkdir()
        (source / "folder").mkdir()
        os.mkfifo(source / "pipe")
        for name in (".written", "written.tmp"):
            (source / name).write_text("{}\n")
        put(source, [b'{"prompt": "a"}'])
        claim_all(spool)
        assert spool.status() == {"rows": 1, "rejected": 0, "ended": False, "problem": ""}
        assert sorted(os.listdir(source)) == [".written", "folder", "pipe", "written.tmp"]
