"""Rows of a procedural task: distinct, the same for all, the held-out ones apart."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.buffers.errors import ConfigError

SPELL = "reasoning_gym:spell_backward"


def test_a_task_gives_distinct_prompts_and_keeps_the_held_out_ones_out_of_training() -> None:
    training, held_out = load_rows(DataConfig(source=SPELL, options={"max_word_len": 3}, size=700, held_out=300))
    prompts = [row.prompt for row in training + held_out]
    assert (len(training), len(held_out)) == (700, 300)
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


def test_where_nothing_is_said_a_task_holds_200_prompts_out() -> None:
    assert len(load_rows(DataConfig(source=SPELL, size=1))[1]) == 200


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
