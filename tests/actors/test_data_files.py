"""Where rows come from: each kind of file gives the same ones, a task distinct ones; what is none is refused by its place."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import random
import subprocess
import sys
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
SPELL = "reasoning_gym:spell_backward"


def saved(path: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "rows.jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
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
    expected = [Row('say "hi",\nthen stop', {"answer": "4"}), Row(long, {"answer": ""})]
    assert load_rows(DataConfig(source=str(path))) == (expected, [])


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
    for value, reason in ((b"\x89PNG", r"\(bytes\); leave it out"), (10**30, r"\(answer: numbers are integers from")):
        with pytest.raises(ConfigError, match=rf"row 7: column 'answer' has no form in JSON {reason}"):
            list(plain([("row 7", {"prompt": "a", "answer": value})]))


HUGE = '{"prompt": "p", "answer": [0, %s]}'


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array([text]) for text in ("spell sun", "nus", "uns")]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["prompt", "answer", "answer"]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet names 2 columns 'answer'; give each a name of its own"):
        load_rows(DataConfig(source=str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.jsonl.gz",
            "a",
            r"rows\.jsonl\.gz' is of no known kind; give \.jsonl, \.json, \.csv, \.parquet \(unpacked\), a dir",
        ),
        ("rows.json", '{"prompt": "a"}\n{"prompt": "b"}\n', r"rows\.json is not JSON: .*one object a line is called \.jsonl"),
        ("rows.json", '{"prompt": "a"}', "holds no list of objects but a dict"),
        ("rows.json", f"[{HUGE % ('9' * 30)}]", r"answer\[1\]: numbers are integers from .*or floats up to"),
        ("rows.parquet", "PAR1", "is no Parquet file that can be read"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"rows\.jsonl:2 is not JSON"),
        ("rows.jsonl", "\udcff", r"rows\.jsonl' cannot be read: it is not UTF-8 .*decode byte 0xff.*iconv"),
        ("rows.jsonl", HUGE % ("9" * 5000), r"answer\[1\]: numbers are integers from"),
        ("rows.jsonl", HUGE % "-1e999", r"answer\[1\]: numbers are integers from"),
        ("rows.csv", "prompt,answer\nI, myself,me\n", r"rows\.csv:2 has 3 cells, the first line names 2 columns; quote commas"),
        ("rows.csv", "prompt,answer,answer\nI,me,you\n", r"rows\.csv:1 names 2 columns 'answer'; give each a name of its own"),
        ("nowhere", None, r"rows\.jsonl' cannot be read: .*No such file.*reasoning_gym:<task>"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        name = "rows.jsonl"
    else:
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig(source=str(tmp_path / name)))


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["rows.parquet"](tmp_path / "rows.parquet", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package pyarrow: pip install 'async-rlhf\[data\]'. Without it: a \.jsonl"
    ):
        load_rows(DataConfig(source=str(tmp_path / "rows.parquet")))


def test_a_task_gives_distinct_prompts_keeps_the_held_out_ones_apart_and_carries_the_entry() -> None:
    training, held_out = load_rows(DataConfig(source=SPELL, options={"max_word_len": 3}, size=700, held_out=300))
    assert (len(training), len(held_out)) == (700, 300)
    assert len({row.prompt for row in training + held_out}) == 1000
    row = training[0]
    assert row.columns["entry"]["question"] == row.prompt
    assert row.columns["answer"] == row.columns["entry"]["metadata"]["word"][::-1]
    assert json.loads(json.dumps(row.columns))["answer"] == row.columns["answer"]
    assert len(load_rows(DataConfig(source=SPELL, size=1))[1]) == 200, "where nothing is said"


def test_two_actors_load_the_same_rows_and_held_out_ones_depend_on_nothing_else() -> None:
    # list_functions draws from Python's global generator too, whose state differs between processes.
    config = DataConfig(source="reasoning_gym:list_functions", size=40, held_out=10)
    random.seed(1)
    first = load_rows(config)
    random.seed(2)
    before = random.getstate()
    assert load_rows(config) == first
    assert random.getstate() == before
    one = load_rows(DataConfig(source=SPELL, size=10, held_out=20))
    other = load_rows(DataConfig(source=SPELL, size=30, held_out=20, options={"seed": 9}))
    assert one[1] == other[1] and one[0] != other[0][:10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": f"{SPELL}s"}, "unknown reasoning-gym task 'spell_backwards'; did you mean 'spell_backward'"),
        (
            {"options": {"min_word_length": 3}},
            r"data\.options\.min_word_length is not an option .* did you mean 'min_word_len'",
        ),
        ({"options": {"size": 3}}, r"set data\.size instead"),
        ({"options": {"min_word_len": 9, "max_word_len": 3}}, "reasoning-gym refuses .* max_word_len must be >= min_word_len"),
        ({"options": {"seed": "one"}}, r"data\.options\.seed must be a whole number, got 'one'"),
        ({"columns": {"prompt": "question"}}, r"data\.columns renames columns of a file"),
        (
            {"source": "reasoning_gym:coin_flip", "options": {"min_trials": 3, "max_trials": 4}, "held_out": 0},
            r"asks reasoning_gym:coin_flip for 4096 distinct prompts, it gave \d+ in 81920",
        ),
    ],
)
def test_what_a_task_cannot_give_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig.model_validate({"source": SPELL, **settings}))


def test_a_task_that_draws_gets_what_it_draws_with_and_others_do_not_pay_for_it() -> None:
    code = (
        "import sys\n"
        "from async_rlhf.actors.gym_tasks import create_dataset\n"
        "assert not {'cellpylib', 'matplotlib'} & set(sys.modules)\n"
        "assert 'Game of Life' in create_dataset('game_of_life', size=1, seed=1)[0]['question']\n"
        "assert 'cellpylib' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
