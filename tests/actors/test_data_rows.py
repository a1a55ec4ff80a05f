"""Rows: renamed, held out, mixed by weight; what is wrong with them is said with the place and the way out."""

from __future__ import annotations

import json
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.data.config import DataConfig, MixedSource
from async_rlhf.actors.data.rows import epoch_of, load_rows
from async_rlhf.actors.prompts import Row, of_prompts
from async_rlhf.buffers.errors import ConfigError


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows") -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts(letter: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{letter}{number}"} for number in range(count)]


def test_the_last_rows_of_a_file_are_held_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"prompt": f"p{number}", "answer": number} for number in range(5)])
    training, held_out = load_rows(DataConfig(source=path, held_out=2))
    assert training == [Row(f"p{number}", {"answer": number}) for number in range(3)]
    assert held_out == [Row("p3", {"answer": 3}), Row("p4", {"answer": 4})]


@pytest.mark.parametrize(("num_rows", "held_out"), [(9, 0), (10, 1), (1999, 199), (2500, 200)])
def test_where_nothing_is_said_at_most_a_tenth_of_a_file_is_held_out(tmp_path: Path, num_rows: int, held_out: int) -> None:
    training, kept_out = load_rows(DataConfig(source=jsonl(tmp_path, prompts("p", num_rows))))
    assert (len(training), len(kept_out)) == (num_rows - held_out, held_out)


def test_columns_are_renamed_to_our_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "q", "gold": "g", "level": 1}])
    config = DataConfig(source=path, held_out=0, columns={"prompt": "question", "answer": "gold"})
    assert load_rows(config)[0] == [Row("q", {"answer": "g", "level": 1})]


def test_rows_that_are_given_are_taken_as_a_file_of_them_would_be(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": (1, 2)}, {"question": "r", "answer": (3,)}]
    config = {"columns": {"prompt": "question"}, "held_out": 1}
    wanted = load_rows(DataConfig(source=jsonl(tmp_path, rows), **config))
    assert wanted[0] == [Row("q", {"answer": [1, 2]})]
    for given_rows in (rows, iter(rows), datasets.Dataset.from_list(rows)):
        assert load_rows(DataConfig(source="caller", **config), given_rows) == wanted
    with pytest.raises(ConfigError, match=r"train\(\.\.\., data=rows\), and none are"):
        load_rows(DataConfig(source="caller"))
    with pytest.raises(ConfigError, match="data, row 2 is a str, not an object"):
        load_rows(DataConfig(source="caller", **config), [rows[0], "text"])


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", {}, r"rows\.jsonl' has no rows; it needs one object with a column 'prompt'"),
        ('{"prompt": "a"}\n', {"held_out": 1}, r"data\.held_out = 1 keeps all 1 rows of .*; highest: 0"),
        ('\n["a"]\n', {}, r"rows\.jsonl:2 is a list, not an object"),
        ('{"question": "a", "gold": 1}\n', {}, r"no column 'prompt', it has question, gold; .*data\.columns\.prompt = \"quest"),
        ('{"prompt": 3}\n', {}, r"rows\.jsonl:1: a prompt is text or a list of messages with role and content, got 3"),
        ('{"prompt": [{"role": "user"}]}\n', {}, "a prompt is text or a list of messages with role and content"),
        (
            '{"question": "q"}\n' * 3,
            {"columns": {"prompt": "questions"}},
            r"names 'questions', which .*rows\.jsonl:1 does not have; did you mean 'question'",
        ),
        ('{"prompt": "a"}\n', {"options": {"min_word_len": 3}}, r"data\.options are for reasoning_gym"),
        ("", {"source": ""}, r"neither data\.source nor data\.sources: give one of them"),
        ("", {"source": "."}, "a directory that save_to_disk did not make; name a file in it"),
    ],
)
def test_a_file_that_does_not_hold_prompts_and_settings_that_do_not_fit_it_are_refused(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    (path := tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig.model_validate({"source": str(path), **settings}))


def test_tasks_are_looked_for_two_levels_below_a_directory_and_no_deeper(tmp_path: Path) -> None:
    for task in ("", "b", "a/two", "a/two/three"):
        (folder := tmp_path / task).mkdir(parents=True, exist_ok=True)
        for name in ("task.toml", "instruction.md"):
            (folder / name).write_text("do it")
    rows, _ = load_rows(DataConfig(source=str(tmp_path), held_out=0))
    assert [row.columns["task"] for row in rows] == ["a/two", "b", "."]


# Several sources


def mixed(folder: Path, *parts: dict[str, Any], **more: Any) -> DataConfig:
    return DataConfig(sources=tuple(MixedSource(**part) for part in parts), **more)


def test_several_sources_are_one_data_set_whose_rows_keep_the_name_of_theirs(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path, prompts("a", 3), "a"), jsonl(tmp_path, [{"question": "b0"}, {"question": "b1"}], "b")
    config = mixed(tmp_path, {"source": a}, {"source": b, "name": "other", "columns": {"prompt": "question"}}, held_out=1)
    training, held_out = load_rows(config)
    assert [(row.prompt, row.columns["source"]) for row in training] == [("a0", "a"), ("a1", "a"), ("b0", "other")]
    assert [row.prompt for row in held_out] == ["a2", "b1"]
    assert epoch_of(config, training) == training


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4))
def test_weights_are_shares_of_an_epoch_in_which_every_row_is_there_as_often_as_its_neighbours(
    parts: list[tuple[int, int]],
) -> None:
    config = DataConfig(sources=tuple(MixedSource(source=f"{n}.csv", weight=weight) for n, (_, weight) in enumerate(parts)))
    training = [Row(f"{n}-{row}", {"source": str(n)}) for n, (size, _) in enumerate(parts) for row in range(size)]
    epoch = epoch_of(config, training)
    counts = Counter(str(row.prompt) for row in epoch)
    assert counts.keys() == {str(row.prompt) for row in training}
    total_weight = sum(weight for _, weight in parts)
    for n, (size, weight) in enumerate(parts):
        own = [counts[f"{n}-{row}"] for row in range(size)]
        assert max(own) - min(own) <= 1
        assert abs(sum(own) - len(epoch) * weight / total_weight) <= len(parts)
    assert any({counts[f"{n}-{row}"] for row in range(size)} == {1} for n, (size, _) in enumerate(parts))
    of_each = [[row for row in training if row.columns["source"] == str(n)] for n in range(len(parts))]
    one_by_one = [row for own in of_each for row in islice(cycle(own), sum(counts[row.prompt] for row in own))]
    assert list(epoch) == one_by_one == epoch[:] == [*epoch[:-1], epoch[-1]]


def test_sources_that_cannot_be_mixed_are_refused(tmp_path: Path) -> None:
    a, b = {"source": jsonl(tmp_path, prompts("a", 3), "a")}, {"source": jsonl(tmp_path, prompts("b", 3), "b")}
    own = {"source": jsonl(tmp_path, [{"prompt": "c", "source": "AMC"}], "c")}
    for parts, more, message in (
        ([a, a], {}, "two of data.sources are called 'a'; give one of them another name"),
        ([a, {**b, "weight": 2}], {}, "'a' has no weight and others have"),
        ([a, b], {"source": "c.csv"}, r"data\.source = 'c\.csv' and data\.sources: give one"),
        ([a, b], {"columns": {"prompt": "q"}}, r"data\.columns is of one source; with data\.sources write it into each"),
        ([a, own], {}, r"a row of 'c' has a column 'source' of its own \('AMC'\), .*columns = { origin"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_rows(mixed(tmp_path, *parts, **more))
    heavy = mixed(tmp_path, {**a, "weight": 1e9}, {**b, "weight": 1})
    with pytest.raises(ConfigError, match=r"an epoch has 3e\+09 prompts, most are 50000000; raise its weight"):
        epoch_of(heavy, load_rows(heavy)[0])


# Messages

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}


def test_messages_are_the_same_rows_from_every_source_whatever_keys_it_gives_them(tmp_path: Path) -> None:
    """Arrow gives each message, each call and each argument the keys of all others, as null."""
    other = {**CALL, "tool_calls": [{"id": "x", "function": {"name": "g", "arguments": {"b": None, "c": [2]}}}]}
    rows = [
        {"prompt": [{"role": "user", "content": "?"}]},
        {"prompt": [CALL, other, {"role": "tool", "name": "g", "content": "6"}]},
    ]
    given = datasets.Dataset.from_list(rows)
    given.save_to_disk(str(tmp_path / "saved"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    sources = (jsonl(tmp_path, rows), str(tmp_path / "rows.parquet"), str(tmp_path / "saved"), "caller")
    found = [load_rows(DataConfig(source=source, held_out=0), given if source == "caller" else None)[0] for source in sources]
    assert all(each == found[0] for each in found)
    assert found[0][0].prompt == [{"role": "user", "content": "?"}]
    assert found[0][1].prompt[1]["tool_calls"] == [{"id": "x", "function": {"name": "g", "arguments": {"c": [2]}}}]


PARTS = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b", "image": None}, "c"]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "a bc"}),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, {"role": "user", "content": "a"}),
        ({"role": "user", "content": "a", "tool_calls": [], "name": None}, {"role": "user", "content": "a"}),
        ({**CALL, "content": None}, {name: value for name, value in CALL.items() if name != "content"}),
    ],
)
def test_what_stands_for_text_is_text(tmp_path: Path, message: dict[str, Any], kept: dict[str, Any]) -> None:
    rows, _ = load_rows(DataConfig(source=jsonl(tmp_path, [{"prompt": [message]}]), held_out=0))
    assert rows[0].prompt == [kept]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "video"}]},
            "'content': part 2 is 'video', and text was expected",
        ),
        ({"content": 3}, "key 'content' is 'int', and text was expected"),
        ({"content": None}, "has no content"),
        (
            {"content": "a", "reasoning_content": [{"type": "thinking", "thinking": "b"}]},
            "key 'reasoning_content': part 1 is 'thinking'",
        ),
        ({"content": "a", "images": ["x.png"]}, "has the key 'images', which is no text"),
        ({"content": "a", "role": None}, "has no role"),
        ("text", "message 2 is a str"),
    ],
)
def test_what_no_template_for_text_can_say_is_refused_with_row_key_and_reason(
    tmp_path: Path, message: Any, reason: str
) -> None:
    message = {"role": "user", **message} if isinstance(message, dict) else message
    path = jsonl(tmp_path, [{"prompt": "fine"}, {"prompt": [{"role": "user", "content": "a"}, message]}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: a prompt is text or a list of messages .*: message 2") as found:
        load_rows(DataConfig(source=path, held_out=0))
    assert reason in str(found.value)


# What the model reads


def test_a_template_that_would_write_what_is_no_text_is_refused_with_the_row(tmp_path: Path) -> None:
    written = [{"prompt": "a", "choices": ["x", "y"], "hint": "h"}, {"prompt": "b", "choices": ["z"], "hint": None}]
    for template, reason in (
        ("{prompt} {choices}", r"prompt 0: data.template names 'choices', which is no text but \['x', 'y'\]; write"),
        ("{hint}", "prompt 1: .*None"),
    ):
        with pytest.raises(ConfigError, match=reason):
            config = DataConfig(source=jsonl(tmp_path, written), template=template, held_out=0)
            of_prompts(load_rows(config)[0], config.row_template.said)
    fine = DataConfig(source=jsonl(tmp_path, written), template="{choices[0]} {choices!r:.9} {prompt:>3}", held_out=1)
    assert fine.row_template.said(load_rows(fine)[0][0]) == "x ['x', 'y'   a"
