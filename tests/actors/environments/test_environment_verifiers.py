"""Environments of verifiers: played unchanged, with the messages and scores that its own rollout gives."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.environments import EnvironmentSpec, load, resolve
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.user_files import import_file
from tests.actors.environments.played import call, walk

with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("verifiers")
    from openai.types.chat import ChatCompletion

SOURCE = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "6 * 7?", "answer": "42"}, {"question": "2 * 2?", "answer": "4"}])

def exact(completion, answer):
    return float(completion[-1]["content"].removeprefix("<think>so</think>") == answer)

def num_calls(completion):
    return sum(len(message.get("tool_calls") or ()) for message in completion)

async def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one number
        b: the other
    """
    return a * b

def tools(max_turns=4):
    rubric = vf.Rubric(funcs=[exact, num_calls], weights=[1.0, 0.1])
    return vf.ToolEnv(tools=[multiply], max_turns=max_turns, dataset=ROWS, rubric=rubric, system_prompt="Use tools.")

class Guess(vf.MultiTurnEnv):
    left = 0

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    @vf.cleanup
    async def leave(self, state):
        Guess.left += 1

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if messages[-1]["content"] == "give up":
            state["final_env_response"] = [{"role": "user", "content": "a pity"}]
        return [{"role": "user", "content": f"no, try {state['tries']}"}]

def guess(max_turns=-1):
    return Guess(dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion, answer: 1.0 / len(completion)]), max_turns=max_turns)

def single():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[exact]))

def nothing(): return 3
def broken(): raise OSError("no licence")
'''


def spec_of(folder: Path, name: str, **options: Any) -> EnvironmentSpec:
    return resolve(f"verifiers:{folder / 'tasks.py'}:{name}", folder, {"answer"}, options)


def rows_of(folder: Path, env: Any) -> list[dict[str, Any]]:
    """The rows of its data set, as a run reads them from the file that the document says how to write."""
    env.get_dataset().to_json(folder / "rows.jsonl")
    return [
        {**row.columns, "prompt": row.prompt} for row in load_rows(DataConfig(source=str(folder / "rows.jsonl"), held_out=0))[0]
    ]


def response(text: str) -> Any:
    """As a server with a tool parser gives it."""
    content, *found = text.split("<tool_call>")
    functions = [json.loads(each.removesuffix("</tool_call>")) for each in found]
    calls = [
        {"id": f"{n}", "type": "function", "function": {**each, "arguments": json.dumps(each.get("arguments", {}))}}
        for n, each in enumerate(functions)
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": content, "tool_calls": calls or None},
    }
    return ChatCompletion.model_validate(
        {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
    )


def said(messages: list[Any]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in messages]


SCRIPTS = {
    "tools": [
        call("multiply", a=6, b=7) + call("multiply", a="x"),
        '<tool_call>{"name": "divide"}</tool_call>',
        "<think>so</think>42",
    ],
    "guess": ["1", "41", "42"],
    "single": ["42"],
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_environment_says_and_scores_what_it_does_in_its_own_rollout(folder: Path, name: str) -> None:
    spec, script = spec_of(folder, name), SCRIPTS[name]
    env = getattr(import_file(folder / "tasks.py"), name)()
    row = rows_of(folder, env)[0]
    left = iter(script)

    async def get_model_response(*arguments: Any, **more: Any) -> Any:
        return response(next(left))

    env.get_model_response = get_model_response
    state = await env.rollout(env.get_dataset()[0], None, "", {})
    await env.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
    read, score = await walk(spec, *script, **row)
    assert read[0] == state["prompt"] and score.value == state["reward"] != 0
    assert {name: value for name, value in score.metrics.items() if name != "unparsed_turns"} == state["metrics"]
    theirs = [message for message in said(state["completion"]) if message[0] != "assistant"]
    assert [message for each in read[1:] for message in said(each)] == theirs


async def test_its_limit_of_turns_is_kept_and_its_options_are_given(folder: Path) -> None:
    spec = spec_of(folder, "tools", max_turns=2)
    assert (spec.name, spec.max_turns, spec.kind) == ("tasks", 2, "async")
    assert [tool["function"]["name"] for tool in spec.tools] == ["multiply"]
    _, score = await walk(spec, call("multiply", a=2, b=2), call("multiply", a=1, b=4), prompt="?", answer="4")
    assert score.value == pytest.approx(0.2) and score.metrics["num_turns"] == 2


async def test_its_last_word_and_an_early_end_run_its_cleanup_once(folder: Path) -> None:
    spec = spec_of(folder, "guess")
    read, score = await walk(spec, "give up", prompt="?", answer="4")
    assert len(read) == 1 and score.value == 0.5
    made = load(spec)(prompt="?", answer="4", seed=1)
    await made.asend(None)
    await made.aclose()
    assert import_file(folder / "tasks.py").Guess.left == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "gave a int, which has no 'env_response'"),
        ("broken", {}, "raised OSError: no licence"),
        ("tools", {"turns": 3}, "unexpected keyword argument 'turns'"),
        ("ROWS", {}, "is a Dataset; a load_environment"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_run(folder: Path, name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, name, **options)
