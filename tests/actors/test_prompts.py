"""The order in which prompts are given, their seeds and their tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.prompts import Row, Template, encode, prompt_number, rollout_seed
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.warm_start.speller import make_tokenizer

SEEDS = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)


@given(SEEDS, st.integers(0, 1 << 20), st.integers(1, 300))
def test_each_epoch_gives_every_row_once(seed: int, epoch: int, num_rows: int) -> None:
    epoch_groups = range(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(prompt_number(seed, group, num_rows) for group in epoch_groups) == list(range(num_rows))


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


# Tokens


def test_a_template_is_filled_with_the_prompt_and_the_columns() -> None:
    tokenizer = make_tokenizer()
    text, ids = encode(Row("2 + 2", {"unit": "apples"}), tokenizer, Template("{prompt} in {unit} {{}}: "))
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
        encode(Row("a", {}), make_tokenizer(), Template(template))


def test_messages_go_through_the_chat_template_with_the_answer_begun() -> None:
    tokenizer = make_tokenizer()
    row = Row([{"role": "user", "content": "Hello"}], {})
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template; give text, without data\.chat"):
        encode(row, tokenizer, Template())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    text, ids = encode(row, tokenizer, Template())
    assert text == "user: Hello\nassistant: "
    assert tokenizer.decode(ids) == text
    as_message = encode(Row("Hello", {"who": "Ann"}), tokenizer, Template("{prompt}, {who}", chat=True))
    assert as_message == encode(Row([{"role": "user", "content": "Hello, Ann"}], {}), tokenizer, Template())
    with pytest.raises(ConfigError, match="cannot be applied to chat messages"):
        encode(row, tokenizer, Template("Please: {prompt}"))


def test_a_prompt_that_the_check_before_a_run_would_have_refused_is_never_given_to_the_model() -> None:
    tokenizer = make_tokenizer()
    assert len(encode(Row("abcd", {}), tokenizer, Template(), 4)[1]) == 4
    with pytest.raises(ConfigError, match=r"has 4 tokens, 1 to 3 are possible; it begins 'abcd'"):
        encode(Row("abcd", {}), tokenizer, Template(), 3)
    with pytest.raises(ConfigError, match="has 0 tokens"):
        encode(Row("", {}), tokenizer, Template(), 3)


def test_importing_what_prepares_prompts_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'reasoning_gym', 'zmq', 'pyarrow', 'datasets'}"
    code = f"import sys, async_rlhf.actors.data.rows, async_rlhf.actors.data.tokens; assert not {heavy} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
