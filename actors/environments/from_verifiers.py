"""Tasksets of verifiers, played by verifiers itself: the engine writes each turn that its agent asks a model for.

    Env.run_episode -> harness -> verifiers' own server -> an endpoint here, of this episode -> yield -> the engine

The endpoint is a chat completion of OpenAI's API, at an address of this machine that only the episode knows. An episode is one
conversation: each request goes on where the one before it ended. Source of the rules: verifiers 0.4, `verifiers.v1`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import ChatDialect

from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted, located
from async_rlhf.actors.environments.settings import Declaration, Message
from async_rlhf.actors.environments.tool_calls import TEMPLATE, Tool, Turn, read_turn
from async_rlhf.buffers.errors import ConfigError, EpisodeError
from async_rlhf.buffers.score import Score

# A step may start a program, or call a tool.
_STEP_S = 120.0
# Until the first request of all: a harness may first make the environment of its program.
_FIRST_S = 600.0
_MAX_REQUEST = 1 << 28
# What rewards look for in a content stays there: reasoning too.
_TEMPLATE = {**TEMPLATE, "fields": {name: each for name, each in TEMPLATE["fields"].items() if name != "reasoning_content"}}

_Requests = asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Message]] | None]
"""Of each request for the model's turn its body, and what takes the message that answers it; None at the episode's end."""


def from_verifiers(named: str, options: Mapping[str, Any]) -> Adapted:
    """options: verifiers' `[env]` block, but for its taskset's id. Raises EpisodeError for what is not there, ConfigError."""
    place, name, found = located(named)
    if not (isinstance(found, type) and issubclass(found, vf.Taskset)):
        raise ConfigError(f"environment {named!r} is no Taskset of verifiers 0.4 (`verifiers.v1.Taskset`), but {found!r}")
    taskset = found.__module__ if place.endswith(".py") else place
    block = {**options, "taskset": {**options.get("taskset", {}), "id": taskset}}
    try:
        env = _environment(block)
    except Exception as error:  # the environment's own code
        raise ConfigError(f"environment {named} raised {type(error).__name__}: {error}") from error
    most = getattr(getattr(env.config, "agent", None), "max_turns", None) or MAX_TURNS

    async def play(prompt: str | list[Message], seed: int, **columns: Any) -> AsyncGenerator[Any, str]:
        row = {name: each for name, each in columns.items() if each is not None}
        said: list[Message] = []
        turns: list[Turn] = []
        async with _played(block, {**row, "prompt": prompt or None}) as (requests, episode):
            while (asked := await requests.get()) is not None:
                body, answered = asked
                messages = [_plain(message) for message in body["messages"]]
                if [*map(_gist, messages[: len(said)])] != [*map(_gist, said)] or len(messages) == len(said):
                    raise ValueError("it does not go on with what the model has read; an episode is one conversation")
                turns.append(read_turn((yield messages[len(said) :]), body.get("tools") or (), _TEMPLATE))
                answer = _openai(turns[-1].message, len(turns))
                said = [*messages, _plain(answer)]
                answered.set_result(answer)
            score = _score(await episode)
        unparsed = sum(turn.is_unparsed for turn in turns)
        yield Score(score.value, metrics={**score.metrics, "unparsed_turns": unparsed})

    declared = Declaration(name=name, max_turns=most, timeout_s=_STEP_S)
    return Adapted(play, declared, tools=lambda: _tools_of(named, env, block))


def _environment(block: Mapping[str, Any]) -> vf.Env[Any]:
    return vf.load_environment(vf.resolve_env_config(copy.deepcopy(dict(block))))


async def _episode(block: Mapping[str, Any], row: Mapping[str, Any], url: str) -> vf.Episode:
    env = _environment(block)  # its own: what it serves while it plays is a state of the object
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(row), env.taskset.config.task)
    async with env.serving():
        client = vf.EvalClientConfig(base_url=url, api_key_var="ASYNC_RLHF_NO_KEY")
        return await env.run_episode(task, vf.ModelContext(model="policy", client=client))


@asynccontextmanager
async def _played(
    block: Mapping[str, Any], row: Mapping[str, Any]
) -> AsyncIterator[tuple[_Requests, asyncio.Future[vf.Episode]]]:
    """What a new episode asks for at its endpoint, on the loopback of this machine; and the episode, which the block ends."""
    requests: _Requests = asyncio.Queue()

    async def completion(request: web.Request) -> web.Response:
        body, answered = await request.json(), asyncio.get_running_loop().create_future()
        requests.put_nowait((body, answered))
        message = await answered
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        whole = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        if body.get("stream"):
            return web.Response(body=b"".join(ChatDialect().stream_events(whole)), content_type="text/event-stream")
        return web.json_response(whole)

    application, secret = web.Application(client_max_size=_MAX_REQUEST), secrets.token_urlsafe()
    application.router.add_post(f"/{secret}/chat/completions", completion)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}"
        episode = asyncio.ensure_future(_episode(block, row, url))
        episode.add_done_callback(lambda _: requests.put_nowait(None))
        try:
            yield requests, episode
        finally:
            episode.cancel()  # nothing where it is done
            await asyncio.gather(episode, return_exceptions=True)
    finally:
        await runner.cleanup()


def _score(episode: vf.Episode) -> Score:
    """The sum of its trainable agents' rewards; each reward and metric is a metric. Raises EpisodeError for one that failed."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    unscored = [name for trace in traces for name, reward in trace.rewards.items() if reward is None]
    if not episode.ok or unscored:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else f"rewards without a score: {unscored}"
        raise EpisodeError(f"verifiers could not end the episode: {reason}")
    metrics = {name: reward.score for trace in traces for name, reward in trace.rewards.items()}
    metrics |= {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
    return Score(sum(trace.reward for trace in traces), metrics=metrics)


def _tools_of(named: str, env: vf.Env[Any], block: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Those that the first request of its first task shows. Raises ConfigError where none comes."""

    async def first() -> tuple[Tool, ...]:
        task = next(iter(env.taskset), None)
        if task is None:
            raise EpisodeError("its taskset has no task")
        async with _played(block, task.data.model_dump()) as (requests, episode):
            asked = await asyncio.wait_for(requests.get(), _FIRST_S)
            if asked is None:
                _score(await episode)
                raise EpisodeError("it asked the model for nothing")
            return tuple(asked[0].get("tools") or ())

    # In a thread of its own: the caller's may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, first()).result()
        except Exception as error:  # the environment's own code
            what = f"asked for nothing in {_FIRST_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise ConfigError(f"environment {named}, tried with its first task: {what}") from error


def _plain(message: Message) -> Message:
    """Its content as text, without what is not there."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError(f"a message of role {message['role']} is not text alone; images are not read here")
        content = "".join(part["text"] for part in content)
    return {name: value for name, value in {**message, "content": content or ""}.items() if value is not None}


def _gist(message: Message) -> tuple[Any, ...]:
    """What the model read of it: a harness may write the rest in its own way."""
    return message["role"], message["content"], [call["function"] for call in message.get("tool_calls") or ()]


def _openai(message: Message, turn: int) -> Message:
    """As a server of OpenAI's API gives it: calls have ids, and arguments as JSON text."""
    calls = [
        {**call, "id": f"call_{turn}_{number}", "function": {**function, "arguments": json.dumps(function["arguments"])}}
        for number, call in enumerate(message.get("tool_calls") or ())
        if (function := call["function"])
    ]
    return {**message, "tool_calls": calls} if calls else message
