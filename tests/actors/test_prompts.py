"""Rows, the order they are given in, their seeds and their tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.config import DataConfig
from async_rlhf.actors.prompts import Row, check_prompts, encode, load_rows, num_training_rows, prompt_number, rollout_seed
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.warm_start.speller import make_tokenizer

SPELL = "reasoning_gym:spell_backward"
SEEDS = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# The order: laws


@given(SEEDS, st.integers(0, 1 << 20), st.integers(1, 300))
def test_each_epoch_gives_every_row_once(seed: int, epoch: int, num_rows: int) -> None:
    epoch_groups = range(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(prompt_number(seed, group, num_rows) for group in epoch_groups) == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(prompt_number(seed, epoch * 50 + position, 50) for position in range(50))

    assert len({order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


def test_the_order_is_the_one_that_journals_of_earlier_runs_rely_on() -> None:
    assert [prompt_number(0, group, 10) for group in range(10)] == [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]


def test_a_prompt_number_without_rows_or_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="got group 0 of 0 rows"):
        prompt_number(0, 0, 0)
    with pytest.raises(ConfigError, match="got group -1 of 5 rows"):
        prompt_number(0, -1, 5)


@given(SEEDS, st.integers(0, 1 << 40), st.integers(0, 1000))
def test_a_rollout_seed_has_63_bits_and_every_argument_changes_it(seed: int, group: int, member: int) -> None:
    seeds = {
        rollout_seed(seed, group, member),
        rollout_seed(seed + 1 if seed < 0 else seed - 1, group, member),
        rollout_seed(seed, group + 1, member),
        rollout_seed(seed, group, member + 1),
    }
    assert len(seeds) == 4
    assert all(0 <= value < 1 << 63 for value in seeds)


def test_rollout_seeds_of_a_run_do_not_collide() -> None:
    seeds = {rollout_seed(7, group, member) for group in range(1500) for member in range(8)}
    assert len(seeds) == 1500 * 8


# Procedural tasks


def test_a_task_gives_distinct_prompts_and_keeps_the_held_out_ones_out_of_training() -> None:
    training, held_out = load_rows(DataConfig(source=SPELL, options={"max_word_len": 3}, size=700, held_out=300))
    prompts = [row.prompt for row in training + held_out]
    assert (len(training), len(held_out)) == (700, 300)
    assert num_training_rows(DataConfig(source=SPELL, size=700, held_out=300)) == 700
    assert len(set(map(str, prompts))) == 1000


def test_a_row_of_a_task_carries_the_answer_and_the_whole_entry() -> None:
    row = load_rows(DataConfig(source=SPELL, size=1, held_out=0))[0][0]
    assert row.columns["entry"]["question"] == row.prompt
    assert row.columns["answer"] == row.columns["entry"]["metadata"]["word"][::-1]
    assert json.loads(json.dumps(row.columns))["answer"] == row.columns["answer"]


def test_two_actors_load_the_same_rows() -> None:
    # list_functions draws from Python's global generator too, whose state differs between processes.
    config = DataConfig(source="reasoning_gym:list_functions", size=40, held_out=10)
    random.seed(1)
    first = load_rows(config)
    random.seed(2)
    before = random.getstate()
    assert load_rows(config) == first
    assert random.getstate() == before


def test_held_out_prompts_do_not_depend_on_how_many_prompts_are_trained_on_or_with_which_seed() -> None:
    one = load_rows(DataConfig(source=SPELL, size=10, held_out=20))
    other = load_rows(DataConfig(source=SPELL, size=30, held_out=20, options={"seed": 9}))
    assert one[1] == other[1]
    assert one[0] != other[0][:10]


def test_an_unknown_task_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown reasoning-gym task 'spell_backwards'; did you mean 'spell_backward'"):
        load_rows(DataConfig(source="reasoning_gym:spell_backwards"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_word_length": 3}, r"data\.options\.min_word_length is not an option .* did you mean 'min_word_len'"),
        ({"size": 3}, r"set data\.size instead"),
        ({"min_word_len": 9, "max_word_len": 3}, "reasoning-gym refuses .* max_word_len must be >= min_word_len"),
        ({"seed": "one"}, r"data\.options\.seed must be a whole number, got 'one'"),
    ],
)
def test_an_option_the_task_does_not_take_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig(source=SPELL, options=options))


def test_a_task_with_too_few_prompts_says_how_many_it_has() -> None:
    config = DataConfig(source="reasoning_gym:coin_flip", options={"min_trials": 3, "max_trials": 4}, held_out=0)
    with pytest.raises(ConfigError, match=r"asks reasoning_gym:coin_flip for 4096 distinct prompts, it gave \d+ in 81920"):
        load_rows(config)


def test_renames_of_columns_are_refused_for_a_task() -> None:
    with pytest.raises(ConfigError, match=r"data\.columns renames columns of a file"):
        load_rows(DataConfig(source=SPELL, columns={"prompt": "question"}))


# Files


def test_the_last_rows_of_a_file_are_held_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"prompt": f"p{number}", "answer": number} for number in range(5)])
    training, held_out = load_rows(DataConfig(source=str(path), held_out=2))
    assert training == [Row(f"p{number}", {"answer": number}) for number in range(3)]
    assert held_out == [Row("p3", {"answer": 3}), Row("p4", {"answer": 4})]


def test_a_training_row_that_repeats_a_held_out_prompt_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path, [{"prompt": prompt} for prompt in ("a", "b", "a", "c", "a")])
    training, held_out = load_rows(DataConfig(source=str(path), held_out=1))
    assert [row.prompt for row in training] == ["b", "c"]
    assert [row.prompt for row in held_out] == ["a"]
    assert "left 2 of 4 training rows out" in caplog.text
    assert num_training_rows(DataConfig(source=str(path), held_out=1)) == 2


def test_columns_are_renamed_to_our_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "q", "gold": "g", "level": 1}])
    config = DataConfig(source=str(path), held_out=0, columns={"prompt": "question", "answer": "gold"})
    assert load_rows(config)[0] == [Row("q", {"answer": "g", "level": 1})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has 0 rows, data\.held_out keeps 0"),
        ('{"prompt": "a"}\n{"prompt": \n', r"rows\.jsonl:2 is not JSON"),
        ('\n["a"]\n', r"rows\.jsonl:2 is a list, not an object"),
        ('{"question": "a", "gold": 1}\n', r"no column 'prompt', it has question, gold; .*data\.columns\.prompt = \"quest"),
        ('{"prompt": 3}\n', r"rows\.jsonl:1: a prompt is text or a list of messages with role and content, got 3"),
        ('{"prompt": [{"role": "user"}]}\n', "a prompt is text or a list of messages with role and content"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_file_that_does_not_hold_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_rows(DataConfig(source=str(path), held_out=0))


def test_a_missing_file_a_missing_column_and_too_many_held_out_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl' cannot be read: .*give a JSONL file or reasoning_gym:"):
        load_rows(DataConfig(source=str(tmp_path / "nowhere.jsonl")))
    path = str(jsonl(tmp_path, [{"question": "q"}] * 3))
    with pytest.raises(ConfigError, match=r"names 'questions', which .*rows\.jsonl:1 does not have; did you mean 'question'"):
        load_rows(DataConfig(source=path, columns={"prompt": "questions"}))
    with pytest.raises(ConfigError, match=r"has 3 rows, data\.held_out keeps 3"):
        load_rows(DataConfig(source=path, columns={"prompt": "question"}, held_out=3))
    with pytest.raises(ConfigError, match=r"every training prompt of .* is also held out"):
        load_rows(DataConfig(source=path, columns={"prompt": "question"}, held_out=1))
    with pytest.raises(ConfigError, match=r"data\.options are for reasoning_gym"):
        load_rows(DataConfig(source=path, options={"min_word_len": 3}))


# Tokens


def test_a_template_is_filled_with_the_prompt_and_the_columns() -> None:
    tokenizer = make_tokenizer()
    text, ids = encode(Row("2 + 2", {"unit": "apples"}), tokenizer, "{prompt} in {unit} {{}}: ")
    assert text == "2 + 2 in apples {}: "
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{promt}", "names the column 'promt', which a row does not have; did you mean 'prompt'"),
        ("{prompt", "cannot be filled"),
        ("{0}", "cannot be filled"),
        ("{prompt.words}", "cannot be filled"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode(Row("a", {}), make_tokenizer(), template)


def test_messages_go_through_the_chat_template_with_the_answer_begun() -> None:
    tokenizer = make_tokenizer()
    row = Row([{"role": "user", "content": "Hello"}], {})
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        encode(row, tokenizer, "{prompt}")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    text, ids = encode(row, tokenizer, "{prompt}")
    assert text == "user: Hello\nassistant: "
    assert tokenizer.decode(ids) == text
    with pytest.raises(ConfigError, match="cannot be applied to chat messages"):
        encode(row, tokenizer, "Please: {prompt}")


def test_the_first_prompt_that_is_too_long_or_empty_is_named() -> None:
    tokenizer = make_tokenizer()
    rows = [Row("abc", {}), Row("abcd", {}), Row("abcde", {})]
    check_prompts(rows, tokenizer, "{prompt}", 5)
    with pytest.raises(ConfigError, match=r"prompt 1 has 4 tokens, generation\.max_prompt_length is 3; .* begins 'abcd'"):
        check_prompts(rows, tokenizer, "{prompt}", 3)
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        check_prompts([Row("", {})], tokenizer, "{prompt}", 3)


def test_importing_this_room_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'reasoning_gym', 'zmq'}"
    code = f"import sys, async_rlhf.actors.prompts; assert not {heavy} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_task_that_draws_gets_what_it_draws_with_and_others_do_not_pay_for_it() -> None:
    code = (
        "import sys\n"
        "from async_rlhf.actors.gym_tasks import create_dataset\n"
        "assert not {'cellpylib', 'matplotlib'} & set(sys.modules)\n"
        "assert 'Game of Life' in create_dataset('game_of_life', size=1, seed=1)[0]['question']\n"
        "assert 'cellpylib' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
