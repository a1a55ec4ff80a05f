"""The SDKs themselves, over a real socket, with whole answers and with streams; and a framework, which adds its own ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.agents.endpoint import Llm
from async_rlhf.actors.environments.settings import Call
from tests.actors.agents.by_hand import echo, play
from tests.actors.environments.played import call

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "The price of an item.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": PRICE}
CLAUDE = {"name": "price", "description": PRICE["description"], "input_schema": PARAMETERS}


def buys(asked: Call, number: int) -> str:
    """The scripted model: it asks for a price, and repeats the tool's answer."""
    last = asked.messages[-1]
    if last["role"] == "tool":
        return f"<think>easy</think>It costs {last['content']}."
    return "Let me see." + call("price", item="tea") + call("price", item="cake")


def chat(llm: Llm, stream: bool) -> float:
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        said: list[Any] = [{"role": "system", "content": "Sell."}, {"role": "user", "content": "Price of tea?"}]
        for _ in range(2):
            options = {"model": llm.model, "messages": said, "tools": [TOOL], "temperature": 0.3}
            if stream:
                with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
                    completion = events.get_final_completion()
            else:
                completion = client.chat.completions.create(**options)
            (choice,) = completion.choices
            assert completion.usage.completion_tokens == 7 and completion.usage.prompt_tokens == 5
            said.append(choice.message)
            for each in choice.message.tool_calls or ():
                item = json.loads(each.function.arguments)["item"]
                said.append({"role": "tool", "tool_call_id": each.id, "content": str(len(item))})
        assert choice.finish_reason == "stop" and choice.message.reasoning_content == "easy"
        return float(choice.message.content == "It costs 4.")


def claude(llm: Llm, stream: bool) -> float:
    with anthropic.Anthropic(base_url=llm.anthropic_url, api_key=llm.api_key) as client:
        said: list[Any] = [{"role": "user", "content": "Price of tea?"}]
        for _ in range(2):
            options = {"model": "claude", "max_tokens": 100, "messages": said, "system": "Sell.", "tools": [CLAUDE]}
            if stream:
                with client.messages.stream(**options) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**options)
            assert message.usage.output_tokens == 7 and message.usage.input_tokens == 5
            said.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": str(len(each.input["item"]))}
                for each in message.content
                if each.type == "tool_use"
            ]
            said += [{"role": "user", "content": results}] if results else []
        assert message.stop_reason == "end_turn"
        return float(
            [each.type for each in message.content] == ["thinking", "text"] and message.content[1].text == "It costs 4."
        )


def respond(llm: Llm, stream: bool) -> float:
    with openai.OpenAI(base_url=f"{llm.origin}/v1", api_key=llm.api_key) as client:  # the session by its key alone
        said: list[Any] = [{"role": "user", "content": "Price of tea?"}]
        for _ in range(2):
            options = {"model": llm.model, "input": said, "instructions": "Sell.", "tools": [{"type": "function", **PRICE}]}
            if stream:
                with client.responses.stream(**options) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(**options)
            assert response.status == "completed" and response.usage.total_tokens == 12
            said += response.output
            for each in response.output:
                if each.type == "function_call":
                    output = str(len(json.loads(each.arguments)["item"]))
                    said.append({"type": "function_call_output", "call_id": each.call_id, "output": output})
        return float(response.output_text == "It costs 4.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [chat, claude, respond])
def test_a_loop_with_tools_is_one_conversation_whatever_the_sdk(agent: Any, stream: bool) -> None:
    played = play(lambda llm: agent(llm, stream), buys)
    assert played.score.value == 1.0, played
    assert played.conversations == [0, 0]
    first, second = played.calls
    assert first.messages == [{"role": "system", "content": "Sell."}, {"role": "user", "content": "Price of tea?"}]
    assert first.tools == (TOOL,) and second.tools == ()
    assert [(each["role"], each["content"], each["name"]) for each in second.messages] == [
        ("tool", "3", "price"),
        ("tool", "4", "price"),
    ]
    assert played.score.metrics == {"calls": 2, "conversations": 1, "unparsed_turns": 0, "retries_joined": 0, "calls_left": 0}


async def asynchronous(llm: Llm, prompt: str) -> dict[str, float]:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        stream = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": prompt}], stream=True, max_tokens=3, stop=["!"]
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return {"right": float(text == "hi"), "length": len(text) / 10}


def test_an_asynchronous_agent_streams_and_names_its_rewards() -> None:
    played = play(asynchronous, lambda asked, number: "hi! there", prompt="say hi")
    assert played.score.value == 1.2 and played.score.metrics["right"] == 1.0 and played.score.metrics["length"] == 0.2
    assert (played.calls[0].max_tokens, played.calls[0].stop) == (3, ("!",))


@pytest.mark.parametrize("dialect", ["responses", "chat"])
def test_the_agents_of_openai_are_played_as_they_are(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def price(item: str) -> str:
        """The price of an item."""
        return str(len(item))

    async def solve(llm: Llm, prompt: str) -> float:
        client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
        kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
        model = kinds[dialect](model=llm.model, openai_client=client)
        helper = agents.Agent(name="helper", instructions="Sell.", model=model, tools=[price])
        result = await agents.Runner.run(helper, prompt)
        streamed = agents.Runner.run_streamed(helper, prompt)
        async for _ in streamed.stream_events():
            pass
        await client.close()
        return float(result.final_output == streamed.final_output == "It costs 4.")

    played = play(solve, buys, prompt="Price of tea?")
    assert played.score.value == 1.0 and played.conversations == [0, 0, 1, 1]
    assert played.calls[0].tools[0]["function"]["name"] == "price"


PYTHON = """
import os, openai
client = openai.OpenAI()
said = [{"role": "user", "content": "hello"}]
for _ in range(2):
    message = client.chat.completions.create(model="any", messages=said).choices[0].message
    said += [message, {"role": "user", "content": "more"}]
print(message.content)
"""

NODE = """
const OpenAI = require("openai");
(async () => {
  const client = new OpenAI(), said = [{ role: "user", content: "hello" }];
  let message;
  for (let i = 0; i < 2; i++) {
    message = (await client.chat.completions.create({ model: "any", messages: said })).choices[0].message;
    said.push(message, { role: "user", content: "more" });
  }
  console.log(message.content);
})();
"""


def runs(command: list[str], folder: Path) -> Any:
    def solve(llm: Llm) -> float:
        environ = {**os.environ, **llm.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.strip() == "2: more")

    return solve


def test_a_program_finds_the_endpoint_by_its_variables_past_a_proxy(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PYTHON)
    played = play(runs([sys.executable, "agent.py"], tmp_path), echo)
    assert played.score.value == 1.0 and played.conversations == [0, 0]


def test_a_program_in_another_language_is_played_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "agent.js").write_text(NODE)
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", "require('openai')"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("there is no node with the package openai (npm install openai, NODE_PATH)")
    played = play(runs([node, "agent.js"], tmp_path), echo)
    assert played.score.value == 1.0 and played.conversations == [0, 0]
