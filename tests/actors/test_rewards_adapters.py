"""Rewards written for other systems run unchanged: every form, synchronous and asynchronous, as a file's function."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym as gym

from async_rlhf.actors.rewards import Answer, RewardSpec, Signature, check_columns, load, resolve
from async_rlhf.buffers.errors import ConfigError

ROW = {
    "completion": "4",
    "prompt": "2 + 2 = ",
    "completion_ids": [4, 0],
    "prompt_ids": [2, 1, 2],
    "finish_reason": "stop",
}

FOREIGN = """
def trl(prompts, completions, completion_ids, answer, trainer_state=None, log_metric=None, **kwargs):
    assert trainer_state is None and prompts == ["2 + 2 = "] and completion_ids == [[4, 0]]
    return [float(given == wanted) for given, wanted in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("sums", "") and extra_info in (None, {"level": 3})
    return float(solution_str == ground_truth)

def compute_score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": solution_str == ground_truth, "acc": 1.0, "pred": solution_str, "huge": 10**400}

async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None):
    return compute_score(data_source, solution_str, ground_truth, extra_info)

def reward_func(queries, prompts, labels, **kwargs):
    assert queries == ["2 + 2 = 4"] and prompts == ["2 + 2 = "]
    import numpy as np
    right = np.array([q[len(p):] == l for q, p, l in zip(queries, prompts, labels)], float)
    return {"rewards": right, "scores": right, "extra_logs": {"length": np.array([1.0])}}

def reward_func_list(queries, prompts, labels):
    return [float(q.endswith(l)) for q, l in zip(queries, labels)]
"""

TRUTH = {"answer": "4"}
MATRIX: list[tuple[str, dict[str, Any], float, dict[str, float]]] = [
    ("foreign.py:trl", TRUTH, 1.0, {}),
    ("trl:foreign.py:trl", TRUTH, 1.0, {}),
    ("foreign.py:compute_score", {"ground_truth": "4", "data_source": "sums", "extra_info": {"level": 3}}, 1.0, {}),
    ("foreign.py:compute_score", {"reward_model": {"style": "rule", "ground_truth": "5"}}, 0.0, {}),
    ("verl:foreign.py:compute_score", {"ground_truth": None, **TRUTH}, 1.0, {}),
    ("foreign.py:compute_score_dict", TRUTH, 1.0, {"acc": 1.0}),
    ("foreign.py:compute_score_async", TRUTH, 1.0, {}),
    ("foreign.py:reward_func", {"label": "4"}, 1.0, {"length": 1.0}),
    ("openrlhf:foreign.py:reward_func_list", TRUTH, 1.0, {}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    return tmp_path


def ask(spec: RewardSpec, columns: dict[str, Any]) -> Answer:
    """Loads and calls the reward the way a worker does."""
    function = load(spec)
    signature = Signature.of(function)
    result = function(**signature.arguments([{**ROW, **columns}], spec.options))
    assert signature.is_async == (spec.kind == "async") == inspect.isawaitable(result)
    (answer,) = signature.read(asyncio.run(result) if signature.is_async else result, 1)
    return answer


@pytest.mark.parametrize(("target", "columns", "value", "metrics"), MATRIX, ids=[f"{m[0]}-{i}" for i, m in enumerate(MATRIX)])
def test_a_foreign_reward_runs_unchanged(
    folder: Path, target: str, columns: dict[str, Any], value: float, metrics: dict[str, float]
) -> None:
    (spec,) = resolve([target], folder)
    answer = ask(spec, columns)
    assert answer.failure is None and answer.value == pytest.approx(value) and answer.metrics == metrics


def test_a_reasoning_gym_scorer_gets_the_completion_as_its_answer(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(
        "import reasoning_gym as gym\ndataset = gym.create_dataset('chain_sum', size=2, seed=1)\nscore = dataset.score_answer\n"
    )
    (spec,) = resolve(["gym:sums.py:score"], tmp_path)
    entry = gym.create_dataset("chain_sum", size=2, seed=1)[0]
    assert ask(spec, {"entry": entry, "completion": entry["answer"], "answer": "not this"}).value == 1.0
    assert (ask(spec, {"entry": entry, "completion": "nonsense"}).value or 0.0) < 1.0


@pytest.mark.parametrize("target", ["foreign.py:compute_score", "foreign.py:reward_func", "gym:foreign.py:trl"])
def test_a_data_set_without_the_answer_is_refused_with_the_names_that_would_do(folder: Path, target: str) -> None:
    with pytest.raises(
        ConfigError, match=r"needs one of the columns .*there is none in every row \(level\)\. Rename one with data\.columns"
    ):
        check_columns(*resolve([target], folder), {"level"})


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2 = "}]


def test_a_chat_reaches_every_form_as_its_system_would_give_it(tmp_path: Path) -> None:
    (tmp_path / "chats.py").write_text(
        "def trl(prompts, completions): return [float(c[0]['content'] == '4' and p[1]['role'] == 'user')"
        " for p, c in zip(prompts, completions)]\n"
        "async def trl_async(prompts, completions): return trl(prompts, completions)\n"
        "def alone(completions): return [float(c == [{'role': 'assistant', 'content': '4'}]) for c in completions]\n"
        "def reward_func(queries, prompts, labels): return [float(queries == ['Add.\\n2 + 2 = 4'])]\n"
    )
    targets = [f"chats.py:{name}" for name in ("trl", "trl_async", "alone", "reward_func")]
    for spec in (*resolve(targets, tmp_path), *resolve(["trl:chats.py:trl"], tmp_path)):
        assert ask(spec, {**TRUTH, "prompt": CHAT}).value == 1.0, spec.name


def test_in_an_episode_of_messages_a_list_form_gets_all_that_stands_behind_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "chats.py").write_text(
        "def trl(completions): return [float([m['role'][0] for m in c] == ['a', 't', 'a']) for c in completions]\n"
    )
    behind = [{"role": role, "content": "4"} for role in ("assistant", "tool", "assistant")]
    for spec in resolve(["chats.py:trl"], tmp_path):
        assert ask(spec, {"prompt": CHAT, "messages": [*CHAT, *behind], "completion_messages": behind}).value == 1.0, spec.name


def test_a_text_prompt_gives_a_list_form_texts_though_the_data_has_columns_of_an_episodes_names(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text("def trl(completions, messages, turns): return [float(completions == ['4'])]\n")
    (spec,) = resolve(["texts.py:trl"], tmp_path)
    assert ask(spec, {"messages": "none", "turns": 3}).value == 1.0


def test_what_is_returned_in_the_wrong_shape_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "def no_score(solution_str, ground_truth): return {'acc': 1.0}\n"
        "def two(queries, prompts, labels): return [1.0, 2.0]\n"
        "def text(solution_str, ground_truth): return {'score': 'good'}\n"
    )
    first, second, third = resolve([f"wrong.py:{name}" for name in ("no_score", "two", "text")], tmp_path)
    for spec, reason in ((first, "without a 'score'"), (second, "for 1 completion; a list of 1 score")):
        with pytest.raises(ValueError, match=reason):
            ask(spec, TRUTH)
    assert "returned str 'good'" in str(ask(third, TRUTH).failure)
