"""Tasksets of verifiers: played by verifiers itself, with the messages and scores that it gives with any other model."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.environments import EnvironmentSpec, load, resolve
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.user_files import import_file
from async_rlhf.run.loading import load as load_config
from tests.actors.agents.by_hand import Played, driven, reply
from tests.actors.environments.played import Bench, call

with warnings.catch_warnings(action="ignore"):
    vf = pytest.importorskip("verifiers.v1")
    from aiohttp import web
    from verifiers.v1.dialects.chat import ChatDialect

    from async_rlhf.actors.agents.from_verifiers import module_id

# A harness that talks to verifiers' server from its own process, as its programs do from theirs.
HARNESS = """
import json
import httpx
import verifiers.v1 as vf

class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False
    STREAMS = False
    TOOLS = ()

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        said += [{"role": message.role, "content": message.content} for message in prompt]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:
            while True:
                message = await self.ask(client, endpoint, said)
                if message is None:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr="refused")
                said.append({name: value for name, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                said += [self.answer(each) for each in message["tool_calls"]]

    async def ask(self, client, endpoint, messages):
        body = {"model": "m", "messages": messages, "tools": list(self.TOOLS), "stream": self.STREAMS}
        answer = await client.post(f"{endpoint}/chat/completions", json=body)
        if answer.status_code != 200:
            return None
        if not self.STREAMS:
            return answer.json()["choices"][0]["message"]
        *chunks, done = answer.text.split("data: ")[1:]
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        calls = [{key: part for key, part in each.items() if key != "index"}
                 for delta in deltas for each in delta.get("tool_calls") or ()]
        content = "".join(delta.get("content") or "" for delta in deltas)
        return {"role": "assistant", "content": content, "tool_calls": calls or None}

    def answer(self, called):
        arguments = json.loads(called["function"]["arguments"])
        try:
            content = {"multiply": lambda a, b: str(a * b)}[called["function"]["name"]](**arguments)
        except (KeyError, TypeError) as error:
            content = f"error: {error!r}"
        return {"role": "tool", "tool_call_id": called["id"], "content": content}
"""

# With tools, a reward with a weight, a metric, and a stop.
TOOLS = (
    HARNESS
    + """
MULTIPLY = {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

class Calculating(Loop):
    STREAMS = True
    TOOLS = ({"type": "function", "function": MULTIPLY},)

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace):
        return float((trace.last_message.content or "").removeprefix("<think>so</think>") == self.data.answer)

    @vf.reward(weight=0.1)
    async def calls(self, trace):
        return float(sum(len(each.tool_calls or ()) for each in trace.messages if each.role == "assistant"))

    @vf.metric
    async def turns(self, trace):
        return float(trace.num_turns)

class Config(vf.TasksetConfig):
    rule: str = "Use tools."

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for question, answer in (("6 * 7?", "42"), ("2 * 2?", "4")):
            yield Sum(Data(prompt=question, answer=answer, system_prompt=self.config.rule), self.config.task)

__all__ = ["Sums", "Calculating"]
nothing = 3
"""
)

# A conversation whose other side is code, which counts how often it ends.
GUESS = (
    HARNESS
    + """
class Data(vf.TaskData):
    answer: str

class Number(vf.Task[Data]):
    @vf.reward
    async def early(self, trace):
        return 1 / trace.num_turns

class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self):
        yield Number(Data(prompt="Guess.", answer="42"), self.config.task)

class Talk(vf.Env[vf.SingleAgentEnvConfig]):
    left = 0

    async def run(self, task, agents):
        try:
            async with agents.agent.interaction(task) as guessing:
                said = await guessing.turn()
                while not said.terminated and said.last_reply != task.data.answer:
                    if said.last_reply == "break":
                        raise OSError("the table fell")
                    if said.last_reply == "beside":
                        await agents.agent.run(task)
                    said = await guessing.turn(f"not {said.last_reply}")
        finally:
            Talk.left += 1

__all__ = ["Numbers", "Talk", "Loop"]
"""
)

HERE = {"agent": {"runtime": {"type": "subprocess"}}}
FILES = {"sums.py": TOOLS, "guess.py": GUESS}
SCRIPTS = {
    "sums.py:Sums": [
        call("multiply", a=6, b=7) + call("multiply", a="x"),
        '<tool_call>{"name": "divide"}</tool_call>',
        "<think>so</think>42",
    ],
    "guess.py:Numbers": ["1", "41", "42"],
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it keeps what its runtimes work in."""
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of processes that begin here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def spec_of(folder: Path, target: str, **options: Any) -> EnvironmentSpec:
    return resolve(f"verifiers:{folder / target}", folder, {**HERE, **options})


async def walk(spec: EnvironmentSpec, *texts: str, **row: Any) -> Played:
    return await driven(load(spec)(seed=1, **row), lambda asked, number: texts[number - 1])


def environment(folder: Path, target: str) -> Any:
    taskset = getattr(import_file(folder / target.partition(":")[0]), target.partition(":")[2])
    return vf.load_environment(vf.resolve_env_config({**HERE, "taskset": {"id": module_id(taskset)}}))


def row_of(folder: Path, env: Any) -> dict[str, Any]:
    """Its first task, as a run reads it from the file that the document says how to write."""
    lines = [task.data.model_dump_json(exclude_defaults=True) + "\n" for task in env.taskset]
    (folder / "rows.jsonl").write_text("".join(lines))
    row = load_rows(DataConfig(source=str(folder / "rows.jsonl"), held_out=0))[0][0]
    return {**row.columns, "prompt": row.prompt}


@asynccontextmanager
async def answering(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A server of these answers, for verifiers alone."""
    left = iter(messages)

    async def completion(request: web.Request) -> web.StreamResponse:
        message = next(left)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        whole = {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
        if not (await request.json()).get("stream"):
            return web.json_response(whole)
        return web.Response(body=b"".join(ChatDialect().stream_events(whole)), content_type="text/event-stream")

    application = web.Application()
    application.router.add_post("/chat/completions", completion)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answered(text: str, turn: int) -> dict[str, Any]:
    """As a server with a tool parser gives it."""
    content, *found = text.split("<tool_call>")
    calls = [as_called(each.removesuffix("</tool_call>"), f"call_{turn}_{number}") for number, each in enumerate(found)]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def as_called(text: str, id: str) -> dict[str, Any]:
    function = json.loads(text)
    return {
        "id": id,
        "type": "function",
        "function": {**function, "arguments": json.dumps(function.get("arguments", {}))},
    }


@pytest.mark.parametrize("target", SCRIPTS)
async def test_a_task_says_and_scores_what_it_does_with_any_other_model(folder: Path, target: str) -> None:
    env, script = environment(folder, target), SCRIPTS[target]
    async with answering([answered(text, turn) for turn, text in enumerate(script, 1)]) as url:
        client = vf.EvalClientConfig(base_url=url, api_key_var="NONE")
        async with env.serving():
            episode = await env.run_episode(next(iter(env.taskset)), vf.ModelContext(model="m", client=client))
    (trace,) = episode.traces
    assert episode.ok and trace.reward > 0
    played = await walk(spec_of(folder, target), *script, **row_of(folder, env))
    assert played.score.value == pytest.approx(trace.reward)
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    ours = {"calls": len(script), "conversations": 1, "retries_joined": 0, "calls_left": 0, "unparsed_turns": 0}
    told = {f"own/{name}" if name in ours else name: value for name, value in {**rewards, **trace.metrics}.items()}
    assert played.score.metrics == {**ours, **told}
    theirs = [(each.role, each.content) for each in trace.messages if each.role != "assistant"]
    assert [(message["role"], message["content"]) for each in played.calls for message in each.messages] == theirs


async def test_its_limit_of_turns_is_known_before_a_run_and_its_options_are_given(folder: Path) -> None:
    options = {"agent": {**HERE["agent"], "max_turns": 2}, "taskset": {"rule": "Calculate."}}
    spec = spec_of(folder, "sums.py:Sums", **options)
    assert (spec.name, spec.max_turns, spec.kind) == ("Sums", 2, "async")
    calls = [call("multiply", a=2, b=2), call("multiply", a=1, b=4)]
    played = await walk(spec, *calls, prompt="?", answer="4", system_prompt="Calculate.")
    assert played.calls[0].messages[0] == {"role": "system", "content": "Calculate."}
    assert [tool["function"]["name"] for tool in played.calls[0].tools] == ["multiply"]
    assert played.score.value == pytest.approx(0.2) and played.score.metrics["turns"] == 2


async def test_an_early_end_ends_its_episode_and_what_fails_is_named(folder: Path) -> None:
    spec = spec_of(folder, "guess.py:Numbers")
    talk = import_file(folder / "guess.py").Talk
    made = load(spec)(prompt="Guess.", answer="4", seed=1)
    before = talk.left
    await made.asend(None)
    await made.aclose()
    assert talk.left == before + 1
    made = load(spec)(prompt="Guess.", answer="4", seed=1)
    await made.asend(None)
    with pytest.raises(Exception, match="OSError: the table fell"):
        await made.asend(reply("break"))
    assert talk.left == before + 2
    played = await walk(spec, "beside", "1", "2", "4", prompt="Guess.", answer="4")
    assert played.conversations == [0, 1, 0, 0], "a history of its own begins another"


def test_episodes_are_played_side_by_side_in_a_process_of_their_own(folder: Path) -> None:
    with Bench(folder, f"verifiers:{folder / 'guess.py'}:Numbers", options=HERE, workers=1) as bench:
        keys = range(6)
        for key in keys:
            bench.begin(key, prompt="Guess.", answer=str(key))
        bench.until(lambda: all(map(bench.ended, keys)), lambda key, turn: reply(str(turn - 1)))
        ends = [bench.ended(key) for key in keys]
    assert [end.score.value for end in ends] == pytest.approx([1 / (key + 1) for key in keys])


def test_a_configuration_names_it_by_a_file_beside_itself(folder: Path) -> None:
    lines = [
        'model = "tiny-speller"',
        "max_steps = 1",
        'data = { source = "rows.jsonl" }',
        "[environment]",
        'function = "verifiers:sums.py:Sums"',
    ]
    lines += ["[environment.options.agent.runtime]", 'type = "subprocess"']
    (folder / "run.toml").write_text("\n".join(lines))
    config = load_config(folder / "run.toml").environment
    spec = config.spec(Path("/"))
    assert spec is not None and spec.target == f"verifiers:{folder / 'sums.py'}:Sums" and spec.timeout_s == 120.0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("sums.py:nothing", {}, "is no Taskset of verifiers 0.4"),
        ("sums.py:Loop", {}, "is no Taskset of verifiers 0.4"),
        ("sums.py:Sums", {"taskset": {"rules": ""}}, "raised ValidationError"),
        ("sums.py:Sums", {"agent": {"harness": {"id": "none_such"}}}, "'none_such' not found"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_run(folder: Path, target: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, target, **options)
