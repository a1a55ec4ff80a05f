"""Files that are damaged, foreign or still being written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.run.run_files import Tail, line_of_step, printable, read_lines, read_object, read_small


def steps(*numbers: int, mark: str = "") -> str:
    return "".join(json.dumps({"step": number, "mark": mark}) + "\n" for number in numbers)


def seen(tail: Tail) -> list[int]:
    return [record["step"] for record in tail.read()]


def test_a_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert seen(tail) == []
    path.write_text(steps(1, 2) + '{"step"')
    assert seen(tail) == [1, 2] and seen(tail) == []
    path.write_text(steps(1, 2, 3))
    assert seen(tail) == [3]


def test_a_tail_goes_on_behind_the_last_line_that_still_stands(tmp_path: Path) -> None:
    """A learner that starts again cuts the file, and may have written more than was there before it is looked at."""
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text(steps(1, 2, 3, 4, 5))
    assert seen(tail) == [1, 2, 3, 4, 5]
    path.write_text(steps(1, 2, 3) + steps(4, 5, 6, 7, mark="again"))
    assert seen(tail) == [4, 5, 6, 7]
    path.write_text(steps(1, 2))
    assert seen(tail) == []
    with path.open("a") as file:
        file.write(steps(3, mark="again"))
    assert seen(tail) == [3]
    path.write_text(steps(1, 2, 3, mark="another"))
    assert seen(tail) == [1, 2, 3]
    path.unlink()
    assert seen(tail) == []


def test_a_tail_can_leave_out_what_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(steps(1, 2))
    tail = Tail(path)
    tail.skip()
    assert seen(tail) == []
    path.write_text(steps(1, 2, 3))
    assert seen(tail) == [3]


def test_a_tail_of_the_end_reads_on_where_the_file_has_begun_anew_and_whole_it_has_both(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(steps(*range(1, 100)))
    tail = Tail(path, 60)
    assert seen(tail) == [98, 99]
    path.rename(tmp_path / "rollouts.jsonl.1")
    path.write_text(steps(100))
    assert seen(tail) == [100]
    path.write_text(steps(100, 101))
    assert seen(tail) == [101] and [record["step"] for record in tail.whole()] == list(range(1, 102)) and seen(tail) == []


def test_of_what_it_left_out_a_tail_knows_the_end_where_a_learner_that_starts_again_cuts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(steps(*range(1, 30_001), mark="x" * 300))
    assert path.stat().st_size > 8 << 20
    tail = Tail(path)
    tail.skip()
    path.write_text(steps(*range(1, 29_951), mark="x" * 300) + steps(*range(29_951, 30_011), mark="again"))
    assert seen(tail) == list(range(29_951, 30_011))


def test_the_line_of_a_step_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert line_of_step(path) is None
    path.write_text(steps(*range(1, 1001)) + '{"no": "step"}\n{"step": 1001, "cu')
    newest, earlier = line_of_step(path), line_of_step(path, 17)
    assert newest is not None and newest["step"] == 1000 and earlier is not None and earlier["step"] == 17
    assert line_of_step(path, 2000) is None
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedError, match="no regular file"):
        line_of_step(path)


def test_lines_that_are_no_records_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_bytes(steps(1).encode() + b"\0" * 5000 + b"\n[1]\n{\r]\n\xff\n" + b"[" * 100_000 + b"\n" + steps(2).encode())
    assert seen(tail) == [1, 2] and tail.unreadable == 5
    assert [record["step"] for record in read_lines(path)] == [1, 2] and seen(Tail(path, 100)) == [2]
    with pytest.raises(DamagedError, match=r"metrics.jsonl is damaged: 5 lines are no JSON objects, the first is line 2"):
        read_lines(path, all_good=True)
    assert read_lines(tmp_path / "none", all_good=True) == []


def test_nothing_but_a_regular_file_of_its_size_is_opened(tmp_path: Path) -> None:
    pipe, directory, large = tmp_path / "pipe", tmp_path / "directory", tmp_path / "large"
    os.mkfifo(pipe)
    directory.mkdir()
    with large.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    for path, message in ((pipe, "is no regular file"), (directory, "is no regular file"), (large, "has 1099511627776 bytes")):
        for read in (read_small, read_object, read_lines, lambda path: Tail(path).read(), lambda path: Tail(path, 1).read()):
            with pytest.raises(DamagedError, match=message):
                read(path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    assert read_object(tmp_path / "none") == {}


def test_the_end_of_a_file_that_has_grown_for_months_is_read_and_not_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(40 << 30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + steps(20_000_000).encode())
    tail = Tail(path)
    tail.skip()
    with path.open("a") as added:
        added.write(steps(20_000_001))
    newest = line_of_step(path)
    assert newest is not None and newest["step"] == 20_000_001 and seen(tail) == [20_000_001]
    assert seen(Tail(path, 100)) == [20_000_000, 20_000_001]
    with pytest.raises(DamagedError, match="at most 8589934592 are read"):
        read_lines(path)


@given(data=st.binary(max_size=200))
def test_whatever_is_in_a_file_it_is_read_or_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    tail = Tail(path)
    assert read_lines(path) == list(tail.rest()) and len(read_lines(path)) + tail.unreadable == data.count(b"\n")
    try:
        assert isinstance(read_object(path), dict)
    except DamagedError as error:
        assert str(path) in str(error)


@given(st.text())
def test_what_is_shown_speaks_to_no_terminal(text: str) -> None:
    shown = printable(text)
    assert all(line.isprintable() for line in shown.split("\n"))
    shown.encode()


def test_an_escape_sequence_is_written_out() -> None:
    assert printable("a\x1b[2J\x07\r\n\u202eb\ud800é") == "a\\x1b[2J\\x07\\r\n\\u202eb\\ud800é"
