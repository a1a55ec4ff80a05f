"""What others have written is read as Python reads it, but for numbers that no 64 bits hold, which are named by their field."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.lines import LineFile, read_lines, read_lines_backwards
from async_rlhf.buffers.parsing import json_value, toml_table

NAMES = st.text("abcxyz_", min_size=1, max_size=6)
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
VALUES = st.recursive(
    st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=5)
BEYOND = ["18446744073709551616", "-9223372036854775809", "9" * 400, "1e999", "9" * 400 + ".5"]


@given(TABLES)
def test_what_64_bits_hold_is_read_as_python_reads_it(table: dict[str, Any]) -> None:
    assert json_value(json.dumps(table)) == json_value(json.dumps(table).encode()) == table
    assert toml_table(tomli_w.dumps(table)) == tomllib.loads(tomli_w.dumps(table))


@given(TABLES, st.lists(NAMES, min_size=1, max_size=4), st.sampled_from([*BEYOND, "9" * 5000]))
def test_a_number_beyond_is_named_by_its_field(table: dict[str, Any], path: list[str], number: str) -> None:
    table, inner = {**table, "mark": None}, f"[0, {number}]"
    for name in reversed(path):
        inner = f'{{"{name}": {inner}}}'
    text = json.dumps(table).replace('"mark": null', f'"mark": {inner}')
    with pytest.raises(ValueError, match=rf"^mark\.{'.'.join(path)}\[1\]: numbers are integers from -9223372036854775808 to "):
        json_value(text)


@pytest.mark.parametrize("number", BEYOND)
def test_a_number_beyond_is_named_by_its_key_in_toml(number: str) -> None:
    with pytest.raises(ValueError, match=r"^learner\.rate: numbers are integers"):
        toml_table(f"[learner]\nrate = {number}\n")


def test_words_for_infinity_and_digits_in_texts_are_no_such_numbers() -> None:
    assert json_value('{"a": Infinity, "b": "' + "9" * 400 + '", "c": 0.0000012345678901234567}') == {
        "a": math.inf, "b": "9" * 400, "c": 0.0000012345678901234567,
    }  # fmt: skip
    assert toml_table("a = inf") == {"a": math.inf}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_what_is_nested_without_end_is_no_value(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_value(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        toml_table(f"a = {'[' * 100_000}")
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"n": 1}}\n{{"x": {text}}}\n')
    assert list(read_lines(path)) == list(read_lines_backwards(path)) == [{"n": 1}]
    assert LineFile(path).cut().last == {"n": 1}
