"""Tools of an environment of one's own: what the model is shown of them, and its calls as the environment reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf import Score, environment, tool_calls
from async_rlhf.actors.environments import EnvironmentSpec, load, resolve
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.buffers.errors import ConfigError
from tests.actors.environments.played import call
from tests.actors.environments.test_environment_rendering import CHATML, SHOWS_TOOLS, tokenizer

SOURCE = '''
from async_rlhf import Score, environment, tool_calls

def price(item: str) -> str:
    """The price of an item.

    Args:
        item: its name
    """
    return {"tea": "3"}.get(item, "not sold")

SCHEMA = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}

@environment(max_turns=4, tools=[price])
def shop(prompt, answer):
    text = yield prompt
    while calls := tool_calls(text):
        text = yield [{"role": "tool", "name": call.name, "content": price(str(call.arguments.get("item")))} for call in calls]
    yield Score(float(answer in text), metrics={"unparsed": float(calls is None)})

@environment(tools=[SCHEMA])
def by_schema(prompt):
    yield prompt

def undescribed(item): return item

@environment(tools=[undescribed])
def of_undescribed(prompt):
    yield prompt

@environment(tools=[{"name": "price"}])
def of_no_tool(prompt):
    yield prompt
'''


def spec_of(folder: Path, name: str) -> EnvironmentSpec:
    return resolve(f"tasks.py:{name}", folder)


@pytest.mark.parametrize("name", ["shop", "by_schema"])
def test_the_template_is_given_the_tools_and_a_prompt_of_text_is_then_a_message(folder: Path, name: str) -> None:
    spec = spec_of(folder, name)
    assert [tool["function"]["name"] for tool in spec.tools] == ["price"]
    shown = Renderer(tokenizer(SHOWS_TOOLS), chat=False, tools=spec.tools).prompt("What is tea?").text
    assert '"name": "price"' in shown and shown.endswith("<|im_start|>user\nWhat is tea?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="leaves out the tool 'price'"):
        Renderer(tokenizer(CHATML), chat=False, tools=spec.tools).check()
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"answers of tools cannot be rendered.*no tools"):
        Renderer(tokenizer(SHOWS_TOOLS.replace("<|im_start|>{{ m.role }}", refuses)), chat=True, tools=spec.tools).check()


@pytest.mark.parametrize(
    ("turns", "read", "score"),
    [
        ((call("price", item="tea"), "it is 3"), [["3"]], Score(1.0, metrics={"unparsed": 0.0})),
        ((call("price", item="tea") + call("price"), "it is 4"), [["3", "not sold"]], Score(0.0, metrics={"unparsed": 0.0})),
        (('<tool_call>{"name": "price", "arguments"</tool_call>',), [], Score(0.0, metrics={"unparsed": 1.0})),
    ],
)
def test_an_environment_reads_the_calls_and_answers_them(folder: Path, turns: Any, read: Any, score: Score) -> None:
    episode = load(spec_of(folder, "shop"))(prompt="What is tea?", answer="3")
    prompt, *answers, end = [episode.send(text) for text in (None, *turns)]
    assert prompt == "What is tea?" and end == score
    assert [[message["content"] for message in each] for each in answers] == read


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ("so: " + call("add", by=1) + call("add", by=2), [("add", {"by": 1}), ("add", {"by": 2})]),
        ('<tool_call>{"name": "wait"}</tool_call>', [("wait", {})]),
        ('<tool_call>{"name": "wait", "id": 3}</tool_call>', [("wait", {})]),
        ('<tool_call>{"name": "wait", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"name": 3}</tool_call>', None),
        ("<tool_call>[]</tool_call>", None),
        ("<tool_call>wait()</tool_call>", None),
    ],
)
def test_calls_are_read_in_order_and_what_cannot_be_read_is_told_apart_from_none(text: str, calls: Any) -> None:
    assert tool_calls(text) == calls


def test_of_a_turn_that_is_cut_anywhere_only_whole_calls_are_read() -> None:
    text = 'I add. <tool_call>{"name": "f", "arguments": {"a": 1, "b": 23}}</tool_call> <tool_call>{"name": "f"}</tool_call>'
    whole = [("f", {"a": 1, "b": 23}), ("f", {})]
    for end in range(len(text) + 1):
        calls = tool_calls(text[:end])
        assert calls is None or calls == whole[: len(calls)], text[:end]
    assert tool_calls(text[: text.index("23")]) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_undescribed", "tool 'undescribed' cannot be described .* type hints"),
        ("of_no_tool", "the tool .*'name': 'price'.* has no function with a name"),
    ],
)
def test_a_tool_that_the_model_cannot_be_shown_is_refused_before_a_run(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, name)


@pytest.mark.parametrize("tools", [print, ["price"], "price"])
def test_what_is_no_list_of_tools_is_refused_where_it_is_written(tools: Any) -> None:
    with pytest.raises(ConfigError, match="must be a list of functions"):
        environment(tools=tools)(lambda: None)
