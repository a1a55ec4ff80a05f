"""Each kind of file gives the same rows, and what cannot be one is refused with the place where it stands."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.files import plain, read_file
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import ConfigError

CHAT = [{"role": "user", "content": 'How, "exactly"?\nTell me.'}]
ROWS: list[dict[str, Any]] = [{"prompt": CHAT, "answer": 4, "tags": ["a", "é"]}, {"prompt": CHAT, "answer": 5, "tags": []}]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def saved(path: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "rows.jsonl": jsonl,
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "rows": saved,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    assert [row for _, row in read_file(str(tmp_path / name))] == ROWS


def test_a_csv_file_gives_text_in_its_columns_however_long_and_quoted(tmp_path: Path) -> None:
    path, long = tmp_path / "rows.csv", "x, " * 100_000
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], ['say "hi",\nthen stop', "4"], [long, ""]])
    assert load_rows(DataConfig(source=str(path))) == (
        [Row('say "hi",\nthen stop', {"answer": "4"}), Row(long, {"answer": ""})],
        [],
    )
    path.write_text("prompt,answer\nwho,me\nI, myself,me\n")
    with pytest.raises(ConfigError, match=r"rows\.csv:3 has 3 cells, the first line names 2 columns; quote commas"):
        load_rows(DataConfig(source=str(path)))


def test_one_split_of_a_saved_directory_is_chosen(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    both = str(tmp_path / "both")
    assert load_rows(DataConfig(source=f"{both}/test"))[0] == [Row("test", {})]
    with pytest.raises(ConfigError, match=r"holds several data sets, or none; choose one: .*/both/train, .*/both/test"):
        load_rows(DataConfig(source=both))


def test_values_that_json_has_no_form_for_become_text_or_are_refused_by_name() -> None:
    given = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "score": np.float64(0.5), "ids": np.arange(2)}
    assert list(plain([("here", given)])) == [("here", {"day": "2026-01-02", "price": "1.50", "score": 0.5, "ids": [0, 1]})]
    with pytest.raises(ConfigError, match=r"row 7: column 'image' has no form in JSON \(bytes\); leave it out"):
        list(plain([("row 7", {"prompt": "a", "image": b"\x89PNG"})]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.txt",
            "a",
            r"rows\.txt' is of no known kind; give \.jsonl, \.json, \.csv, \.parquet, a directory saved by datasets",
        ),
        ("rows.json", '{"prompt": "a"}\n{"prompt": "b"}\n', r"rows\.json is not JSON: .*one object a line is called \.jsonl"),
        ("rows.json", '{"prompt": "a"}', "holds no list of objects but a dict"),
        ("rows.parquet", "PAR1", "is no Parquet file that can be read"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"rows\.jsonl:2 is not JSON"),
        ("rows.jsonl", "\udcff", r"rows\.jsonl' cannot be read: .*can't decode byte 0xff"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig(source=str(tmp_path / name)))


def test_a_file_that_is_missing_and_a_directory_that_nothing_was_saved_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl' cannot be read: .*No such file.*reasoning_gym:<task>"):
        load_rows(DataConfig(source=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ConfigError, match="a directory that save_to_disk did not make; name a file in it"):
        load_rows(DataConfig(source=str(tmp_path)))


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["rows.parquet"](tmp_path / "rows.parquet", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package pyarrow: pip install 'async-rlhf\[data\]'. Without it: a \.jsonl"
    ):
        load_rows(DataConfig(source=str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "-1e999"])
def test_a_number_that_no_64_bits_hold_is_named_by_its_column(number: str, tmp_path: Path) -> None:
    row = f'{{"prompt": "p", "answer": [0, {number}]}}'
    for name, content in (("rows.jsonl", row), ("rows.json", f"[{row}]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=r"answer\[1\]: numbers are integers from .*or floats up to"):
            list(read_file(str(tmp_path / name)))


def test_such_a_number_in_rows_of_a_program_is_named_too() -> None:
    with pytest.raises(ConfigError, match=r"row 3: column 'answer' has no form in JSON \(answer: numbers are integers from"):
        list(plain([("row 3", {"prompt": "p", "answer": 10**30})]))
