"""Kept rows: what is written is read again, whole or one by one, and a process holds hardly any of it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.data import kept
from async_rlhf.actors.data.kept import KeptRows, written
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import DamagedError

TEXTS = st.text() | st.sampled_from(['}, {"prompt": ', '"}\n{', "\u2028\x85\r", "\ud800"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "a"]), inner, max_size=2),
    max_leaves=6,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=2)
ROWS = st.lists(st.builds(Row, TEXTS | MESSAGES, st.dictionaries(st.sampled_from(["answer", "entry"]), VALUES)), max_size=40)


def one_by_one(rows: list[Row]) -> bytes:
    """The slow twin of `written`."""
    return "".join(json.dumps({"prompt": row.prompt, **row.columns}) + "\n" for row in rows).encode()


@given(ROWS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 200))
def test_rows_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], batch: int, stride: int, chunk: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_BATCH", batch), ("_STRIDE", stride), ("_CHUNK", chunk)):
            patch.setattr(kept, name, value)
        file.write_bytes(b"".join(written(rows)))
        assert file.read_bytes() == one_by_one(rows)
        found = KeptRows(file, len(rows))
        assert list(found) == [found[number] for number in range(len(found))] == found[:] == rows
        assert found[1:7:2] == rows[1:7:2] and (not rows or found[-1] == rows[-1])
        with pytest.raises(IndexError):
            found[len(rows)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "a"}\n', "it has 1 whole rows, written were 2"),
        ('{"prompt": "a"}\n{"prompt": "b"', "it has 1 whole rows"),
        ('{"prompt": "a"}\n["b"]\n', "row 1 cannot be read"),
        ('{"prompt": "a"}\n{"answer": 1}\n', "row 1 cannot be read"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', "row 1 cannot be read"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_named_where_it_is_read(tmp_path: Path, text: str, reason: str) -> None:
    (file := tmp_path / "rows.jsonl").write_text(text)
    for read in (list, lambda rows: rows[1]):
        with pytest.raises(DamagedError, match=rf"rows\.jsonl is damaged: {reason}"):
            read(KeptRows(file, 2))
    with pytest.raises(DamagedError, match=r"is damaged: .*No such file"):
        KeptRows(tmp_path / "none")


def test_a_file_that_is_cut_off_or_gone_while_it_is_read_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_bytes(one_by_one([Row("a", {}), Row("b", {})]))
    rows = KeptRows(file, 2)
    for change in (lambda: file.write_bytes(b""), file.unlink):
        change()
        with pytest.raises(DamagedError, match=r"rows\.jsonl is damaged"):
            rows[1]


def test_what_a_process_holds_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(num_rows: int) -> int:
        file = tmp_path / f"{num_rows}.jsonl"
        file.write_text("".join(f'{{"prompt": "prompt number {number} of many", "answer": 1}}\n' for number in range(num_rows)))
        tracemalloc.start()
        rows: Any = KeptRows(file)
        assert rows[num_rows - 1].prompt == f"prompt number {num_rows - 1} of many"
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(200_000) < 2 * peak(40_000) < 20 << 20  # a chunk of the file, and the places of its lines


def test_a_file_without_rows_has_none(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert list(KeptRows(tmp_path / "rows.jsonl", 0)) == []
