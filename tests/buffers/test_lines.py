"""Lines are in a file whole or not at all, reading costs no memory; numbers that no 64 bits hold are named by their field; and
what a rollout's timings say of its stages, and how much of them somebody else's work hid."""

from __future__ import annotations

import json
import math
import re
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.files import DISK
from async_rlhf.buffers.lines import LineFile, read_lines, read_lines_backwards
from async_rlhf.buffers.parsing import json_value, loads, toml_table
from async_rlhf.buffers.stages import Activity, SpanFile, StageTime, pack, pack_ahead, stage_metrics, unpack
from tests.conftest import file_size_limit

PAGE = 4096


def up_to(step: int) -> Any:
    return lambda line: line["step"] <= step


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def write(path: Path, *numbers: int, padding: int = 0) -> None:
    with path.open("a") as file:
        for step in numbers:
            file.write(json.dumps({"step": step, "text": "x" * padding}) + "\n")


@pytest.mark.parametrize("there", [(1, 2, 3), ()], ids=["three lines", "no line"])
@pytest.mark.parametrize("behind", [b"", b'{"step": 4, "te', b"\0" * PAGE, b"\0" * PAGE + b"\n", b"[4]\n", b"\xff\n", b"\n\n"])
def test_what_is_behind_the_last_whole_line_is_cut_and_counted(tmp_path: Path, behind: bytes, there: tuple[int, ...]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *there)
    whole = path.read_bytes()
    path.write_bytes(whole + behind)
    file = LineFile(path)
    cut = file.cut()
    assert (cut.last, cut.damaged) == ({"step": 3, "text": ""} if there else None, len(behind))
    assert path.read_bytes() == whole
    file.write('{"step": 4}')
    file.close()
    assert steps(path) == [*there, 4]


@pytest.mark.parametrize("step", range(6))
def test_a_file_is_cut_behind_the_last_line_that_is_wanted(tmp_path: Path, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 2, 4, padding=70_000)  # longer than what is read at once
    cut = LineFile(path).cut(up_to(step))
    kept = [each for each in (1, 2, 2, 4) if each <= step]
    assert steps(path) == kept and cut.damaged == 0
    assert (cut.last or {}).get("step") == (kept[-1] if kept else None)


def test_a_hole_in_the_middle_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *range(1, 200), padding=100)
    data = bytearray(path.read_bytes())
    data[PAGE : 2 * PAGE] = bytes(PAGE)
    path.write_bytes(data)
    assert LineFile(path).cut().damaged == 0
    found = steps(path)
    lost = set(range(1, 200)) - set(found)
    assert found == sorted(found) and lost == set(range(min(lost), max(lost) + 1)) and found[-1] == 199
    (message,) = caplog.messages
    begins, ends = data.rfind(b"\n", 0, PAGE) + 1, data.find(b"\n", 2 * PAGE) + 1
    assert f"metrics.jsonl is damaged: bytes {begins} to {ends} are not a line" in message


def test_a_long_file_with_damage_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write(path, *range(1, 1025), padding=1 << 16)  # 64 MiB
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + (64 << 20))  # and as much that was never written
    tracemalloc.start()
    try:
        cut = LineFile(path).cut(up_to(3))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cut.last is not None and cut.last["step"] == 3 and cut.damaged == 64 << 20
    assert peak < 2 << 20
    assert steps(path) == [1, 2, 3]


def test_half_a_line_is_gone_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    file = LineFile(path)
    file.write('{"step": 1}')
    with file_size_limit(20), pytest.raises(OSError, match="File too large"):
        file.write('{"step": 2, "text": "more than fits"}')
    assert path.stat().st_size == 20 and steps(path) == [1]
    file.write('{"step": 3}')
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_file_that_cannot_be_made_is_made_when_it_can(tmp_path: Path) -> None:
    in_the_way = tmp_path / "spans"
    in_the_way.write_text("no directory")
    file = LineFile(in_the_way / "actor.jsonl")
    file.cut()
    with pytest.raises(OSError, match="spans"):
        file.write('{"step": 1}')
    in_the_way.unlink()
    file.write('{"step": 2}')
    file.sync()
    file.close()
    assert steps(in_the_way / "actor.jsonl") == [2]


LINE = len(json.dumps({"step": 10, "text": "x" * 80})) + 1


def test_a_file_with_a_limit_keeps_the_newest_lines_and_no_more_than_twice_as_many(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    file = LineFile(path, max_bytes=10 * LINE)
    for step in range(10, 99):
        file.write(json.dumps({"step": step, "text": "x" * 80}))
        found = steps(path)
        assert found == list(range(found[0], step + 1)) and len(found) >= min(10, step - 9)
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= 20 * LINE
    file.close()
    assert sorted(part.name for part in tmp_path.iterdir()) == ["rollouts.jsonl", "rollouts.jsonl.1"]


@pytest.mark.parametrize("step", [28, 29, 30, 37, 99, 9])
def test_a_file_that_began_anew_is_cut_as_if_it_were_one(tmp_path: Path, step: int) -> None:
    path = tmp_path / "rollouts.jsonl"
    file = LineFile(path, max_bytes=10 * LINE)
    for each in range(10, 38):
        file.write(json.dumps({"step": each, "text": "x" * 80}))
    file.close()
    there = steps(path)
    again = LineFile(path, max_bytes=10 * LINE)
    last = again.cut(up_to(step)).last
    kept = [each for each in there if each <= step]
    assert steps(path) == kept and (last or {}).get("step") == (kept[-1] if kept else None)
    again.write(json.dumps({"step": 99, "text": ""}))
    again.close()
    assert steps(path) == [*kept, 99]


def test_what_stood_in_a_file_that_begins_anew_is_durable_before_the_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "rollouts.jsonl", list[str]()
    monkeypatch.setattr(DISK, "sync_path", lambda path: done.append(f"sync {path.name}"))
    replace = DISK.replace
    monkeypatch.setattr(DISK, "replace", lambda old, new: (done.append(f"move {old.name}"), replace(old, new)))
    file = LineFile(path, max_bytes=1)
    file.write('{"step": 1}')
    file.write('{"step": 2}')
    file.close()
    assert done == ["sync rollouts.jsonl", f"sync {tmp_path.name}", "move rollouts.jsonl"]


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


@given(TABLES.map(json.dumps) | st.text('0123456789-+.eE[]{},:"\\uda \n\x00\ufeffé', max_size=30))
def test_json_is_read_as_python_reads_it_and_refused_where_it_refuses_it(text: str) -> None:
    try:
        wanted = repr(json.loads(text))
    except ValueError as error:
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            loads(text)
    else:
        assert repr(loads(text)) == repr(loads(text.encode("utf-8", "surrogatepass"))) == wanted


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


def test_stages_come_back_from_a_rollouts_timings_in_their_order() -> None:
    stages = {"generation": StageTime(1.0, 2.0), "a.b": StageTime(2.0, 5.0, 1.5)}
    timings = json.loads(json.dumps(pack(stages)))
    assert unpack({**timings, "other_s": 1.0}) == stages and list(unpack(timings)) == ["generation", "a.b"]


def test_what_no_decoding_hid_is_reported_for_each_reward_and_as_a_share() -> None:
    first = pack({"generation": StageTime(0.0, 4.0), "judge": StageTime(4.0, 6.0, 2.0), "exact": StageTime(4.0, 4.5, 0.5)})
    second = pack({"generation": StageTime(0.0, 2.0), "judge": StageTime(2.0, 3.0, 0.5), "exact": StageTime(2.0, 2.5, 0.5)})
    assert stage_metrics([first, second]) == {
        "stages/generation/seconds": 3.0, "stages/judge/seconds": 1.5, "stages/exact/seconds": 0.5,
        "stages/judge/exposed_s": 0.25, "stages/exact/exposed_s": 0.0,
        "stages/exposed_ratio": pytest.approx(0.5 / 4.0),
    }  # fmt: skip
    assert stage_metrics([{}]) == {}


def test_what_was_done_ahead_is_told_apart_from_the_call_at_the_end() -> None:
    timings = {**pack({"judge": StageTime(1.0, 2.0, 1.0)}), **pack_ahead({"judge": 3.0})}
    assert unpack(timings) == {"judge": StageTime(1.0, 2.0, 1.0)}
    metrics = stage_metrics([timings, pack({"judge": StageTime(1.0, 2.0)})])
    assert (metrics["stages/judge/ahead_s"], metrics["stages/judge/seconds"]) == (3.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=12), st.integers(0, 100), st.integers(0, 30))
def test_what_is_covered_is_what_counting_seconds_says(spans: list[tuple[int, int]], began: int, length: int) -> None:
    busy = {second for start, width in spans for second in range(start, start + width)}
    found = Activity((start, start + width) for start, width in spans)
    asked = range(began, began + length)
    assert found.covers(began, began + length) == len(busy & set(asked))
    found.forget(began)
    assert found.covers(began, began + length) == len(busy & set(asked))


def test_the_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "actor-0.jsonl"
    file = SpanFile(path)
    file.write("idle", 1.0, 2.5)
    file.write("adopt", 2.0, 2.1, version=3)
    file.close()
    with path.open("a") as torn:
        torn.write('{"name": "id')
    assert list(read_lines(path)) == [
        {"name": "idle", "began": 1.0, "ended": 2.5},
        {"name": "adopt", "began": 2.0, "ended": 2.1, "version": 3},
    ]
    assert list(read_lines(tmp_path / "nobody.jsonl")) == []
