"""What producers bring in, whole or not at all; and what others may leave in a spool: read in pieces, never followed, named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from async_rlhf.buffers.errors import ConfigError, SpoolError
from async_rlhf.buffers.files import DISK, Disk
from async_rlhf.buffers.spool import claims
from async_rlhf.buffers.spool.claims import RejectedLine, Spool, has_claimed
from async_rlhf.buffers.spool.deposit import END, MAX_ROW_BYTES, Deposited, end, put
from async_rlhf.buffers.spool.stream import PromptStream


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


Opened = Callable[..., Spool]


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


@pytest.mark.parametrize("claimed", [False, True])
def test_of_rows_that_are_written_while_the_spool_ends_none_is_left_unclaimed(tmp_path: Path, claimed: bool) -> None:
    class Ends(Disk):
        def replace(self, old: Path, new: Path) -> None:
            super().replace(old, new)
            if new.suffix == ".jsonl":
                end(tmp_path)
                if claimed:
                    new.unlink()

    if claimed:
        assert put(tmp_path, [b"{}"], files=Ends()).rows == 1
    else:
        with pytest.raises(ConfigError, match="has ended"):
            put(tmp_path, [b"{}"], files=Ends())
    assert [path.name for path in tmp_path.iterdir()] == [END]


def test_nothing_comes_in_behind_the_end_or_where_there_is_no_spool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory; a run makes its own when it starts"):
        put(tmp_path / "none", [b"{}"])
    (run := tmp_path / "run").mkdir()
    (run / "manifest.json").touch()
    for closes in (False, True):
        with pytest.raises(ConfigError, match="is a run directory, no spool"):
            end(run) if closes else put(run, [b"{}"])
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
    [("replace", "spool", errno.EROFS), ("replace", "spool", errno.EACCES), ("append", "own", errno.ENOSPC)],
)
def test_a_run_names_a_spool_or_a_disk_that_takes_nothing_and_goes_on_when_it_does(
    operation: str, where: str, reason: int, opened: Opened, tmp_path: Path
) -> None:
    disk = RefusingDisk(operation, tmp_path / where, reason)
    spool, source = opened(disk), tmp_path / "spool"
    put(source, [b'{"prompt": "a"}'])
    for _ in range(3):
        assert not spool.turn() and os.strerror(reason) in spool.status()["problem"], "it is tried again, and not at once"
    assert spool.stream.num_rows == 0
    disk.reason = 0
    claim_all(spool)
    assert spool.status() == {"rows": 1, "rejected": 0, "ended": False, "problem": ""} and os.listdir(source) == []


def test_a_spool_that_is_away_is_named_until_it_is_back_and_what_is_no_file_stays_in_it(opened: Opened, tmp_path: Path) -> None:
    spool, source = opened(), tmp_path / "spool"
    source.rmdir()
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


GOOD = '{"prompt":"good"}'


class CountingDisk(Disk):
    """Counts the bytes that are read of claimed files."""

    num_read = 0

    def read_at(self, file: Any, length: int, offset: int) -> bytes:
        piece = super().read_at(file, length, offset)
        self.num_read += len(piece)
        return piece


def look(lines: Sequence[bytes]) -> list[str | RejectedLine]:
    return [line.decode() if line.startswith(b"{") else RejectedLine("it is no object") for line in lines]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Spool]]:
    """`opened(files)`: the spool of a run; the next is that of its next life."""
    with ExitStack() as streams:

        def make(files: Disk = DISK) -> Spool:
            streams.close()
            (tmp_path / "spool").mkdir(exist_ok=True)
            stream = streams.enter_context(closing(PromptStream(tmp_path / "own", files=files)))
            return Spool(tmp_path / "spool", tmp_path / "own", stream, look, files)

        yield make


def rejected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "own" / "rejected").iterdir()
    }


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


def newlines(path: Path) -> None:
    path.write_bytes(b"\n" * (3 << 20))


def one_line(path: Path) -> None:
    path.write_bytes(b"a" * (3 << 20))


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (hole, ["it is longer than 16777216 bytes: it and all behind it was left out"]),
        (newlines, []),
        (one_line, [f"it is longer than {MAX_ROW_BYTES} bytes"]),
    ],
)
def test_a_turn_reads_so_many_bytes_and_what_lies_behind_a_large_file_is_bound(
    make: Callable[[Path], None], reasons: list[str], opened: Opened, tmp_path: Path
) -> None:
    disk = CountingDisk()
    spool = opened(disk)
    make(tmp_path / "spool" / "0-large.jsonl")
    (tmp_path / "spool" / "1-good.jsonl").write_text(GOOD)
    with patch.object(claims, "_MAX_LINE_BYTES", 16 << 20):
        more = True
        while more:
            before = disk.num_read
            more = spool.turn()
            assert disk.num_read - before <= 2 * claims._PIECE
    assert [spool.stream.row(number) for number in range(spool.stream.num_rows)] == [GOOD]
    found = rejected(tmp_path)
    assert [line["reason"] for line in found.get("000000001-0-large.jsonl", [])] == reasons
    assert not spool.problem and spool.status()["rejected"] == len(reasons)


def test_what_is_set_aside_can_be_read_by_this_user_alone(opened: Opened, tmp_path: Path) -> None:
    spool = opened()
    (tmp_path / "spool" / "bad.jsonl").write_text("-----BEGIN KEY-----\n")
    claim_all(spool)
    assert (tmp_path / "own" / "rejected" / "000000001-bad.jsonl").stat().st_mode & 0o777 == 0o600


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text("-----BEGIN KEY-----\n")
    path.symlink_to(secret)


def memory(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


KINDS: list[Callable[[Path], Any]] = [link, Path.mkdir, os.mkfifo, memory]


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_regular_file_is_left_alone_and_neither_read_nor_waited_for(
    make: Callable[[Path], Any], opened: Opened, tmp_path: Path
) -> None:
    spool = opened()
    make(tmp_path / "spool" / "0-strange.jsonl")
    (tmp_path / "spool" / "1-good.jsonl").write_text(GOOD)
    claim_all(spool)
    assert spool.stream.num_rows == 1 and not rejected(tmp_path) and not spool.problem
    assert os.listdir(tmp_path / "spool") == ["0-strange.jsonl"]


@pytest.mark.parametrize("make", KINDS)
def test_what_becomes_no_file_at_last_is_set_aside_unread(make: Callable[[Path], Any], opened: Opened, tmp_path: Path) -> None:
    spool = opened()
    make(tmp_path / "spool" / "0-strange.jsonl")
    with patch.object(Disk, "is_readable", lambda self, path: path.name[0].isdigit() and path.parent.name == "spool"):
        spool.turn()
    (tmp_path / "spool" / "1-good.jsonl").write_text(GOOD)
    again = opened()
    claim_all(again)
    assert again.stream.num_rows == 1 and not again.problem
    (lines,) = rejected(tmp_path).values()
    assert [line["reason"] for line in lines] == ["it is no regular file that this user may read"]
    assert "BEGIN KEY" not in str(lines)


def test_a_run_is_not_given_up_while_files_that_it_has_claimed_lie_in_the_spool(opened: Opened, tmp_path: Path) -> None:
    spool = opened()
    (tmp_path / "spool" / "a.jsonl").write_text(f"{GOOD}\n" * (claims._PIECE // 8))
    assert not has_claimed(tmp_path / "own")
    with patch.object(PromptStream, "append", side_effect=OSError(errno.ENOSPC, "full")):
        spool.turn()
    assert has_claimed(tmp_path / "own") and [name[:9] for name in os.listdir(tmp_path / "spool")] == [".claimed-"]
    again = opened()
    claim_all(again)
    assert again.stream.num_rows == claims._PIECE // 8 and not os.listdir(tmp_path / "spool")


def test_what_is_appended_to_a_claimed_file_is_not_waited_for(opened: Opened, tmp_path: Path) -> None:
    spool = opened()
    path = tmp_path / "spool" / "a.jsonl"
    path.write_text(f"{GOOD}\n" * (claims._PIECE // 8))
    with path.open("a") as writer:
        while spool.turn():
            writer.write(f"{GOOD}\n" * claims._PIECE)
            writer.flush()
    assert spool.stream.num_rows == claims._PIECE // 8


def test_the_end_of_a_spool_is_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "END").symlink_to(tmp_path / "kept")
    with pytest.raises(ConfigError, match="cannot be ended"):
        end(tmp_path / "spool")
    assert (tmp_path / "kept").read_text() == "kept"
