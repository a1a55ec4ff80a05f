"""Tasksets of verifiers, played by verifiers itself, whose agents ask the endpoint here for the model's turns.

    Env.run_episode -> harness -> verifiers' own server -> our endpoint -> yield -> the engine

Source of the rules: verifiers 0.4, `verifiers.v1`.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from async_rlhf.actors.agents.adapter import STEP_S, agent_of
from async_rlhf.actors.agents.endpoint import Llm
from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted, located
from async_rlhf.actors.environments.settings import EnvironmentDeclaration, Message
from async_rlhf.actors.environments.tool_calls import TEMPLATE
from async_rlhf.buffers.errors import ConfigError, EpisodeError
from async_rlhf.buffers.score import Score

# What rewards look for in a content stays there: reasoning too.
_TEMPLATE = {**TEMPLATE, "fields": {name: field for name, field in TEMPLATE["fields"].items() if name != "reasoning_content"}}


def from_verifiers(named: str, options: Mapping[str, Any]) -> Adapted:
    """options: verifiers' `[env]` block, but for its taskset's id. Raises EpisodeError for what is not there, ConfigError."""
    place, name, target = located(named)
    if not (isinstance(target, type) and issubclass(target, vf.Taskset)):
        raise ConfigError(f"environment {named!r} is no Taskset of verifiers 0.4 (`verifiers.v1.Taskset`), but {target!r}")
    taskset = module_id(target) if place.endswith(".py") else place
    block = {**options, "taskset": {**options.get("taskset", {}), "id": taskset}}
    try:
        env = _environment(block)
    except Exception as error:  # the environment's own code
        raise ConfigError(f"environment {named} raised {type(error).__name__}: {error}") from error
    most = getattr(getattr(env.config, "agent", None), "max_turns", None) or MAX_TURNS

    async def solve(llm: Llm, prompt: str | list[Message], seed: int, **columns: Any) -> Score:
        row = {name: value for name, value in columns.items() if value is not None}
        return _score(await _episode(block, {**row, "prompt": prompt or None}, llm))

    return agent_of(solve, EnvironmentDeclaration(name=name, max_turns=most, timeout_s=STEP_S), _TEMPLATE)


def module_id(taskset: type) -> str:
    """A name under which verifiers can import the module of a file: without dots and capitals."""
    name = f"_async_rlhf_taskset_{hashlib.sha256(taskset.__module__.encode()).hexdigest()[:16]}"
    sys.modules[name] = sys.modules[taskset.__module__]
    return name


def _environment(block: Mapping[str, Any]) -> vf.Env[Any]:
    return vf.load_environment(vf.resolve_env_config(copy.deepcopy(dict(block))))


async def _episode(block: Mapping[str, Any], row: Mapping[str, Any], llm: Llm) -> vf.Episode:
    env = _environment(block)  # its own: what it serves while it plays is a state of the object
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(row), env.taskset.config.task)
    async with env.serving():
        client = vf.EvalClientConfig(base_url=llm.base_url, api_key_var="ASYNC_RLHF_NO_KEY")
        return await env.run_episode(task, vf.ModelContext(model=llm.model, client=client))


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
