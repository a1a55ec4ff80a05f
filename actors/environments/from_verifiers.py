"""Environments of verifiers, played as `MultiTurnEnv.rollout` plays them; the model's turns come from the engine.

Source of the rules: `MultiTurnEnv.rollout` and `Rubric.score_rollout` of verifiers 0.1.9. Its errors (`vf.Error`) fail the
episode, where verifiers goes on to score what there is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted, located
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.settings import Declaration, Message
from async_rlhf.actors.environments.tool_calls import TEMPLATE, read_turn
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score

_NEEDED = (
    "env_response",
    "setup_state",
    "get_prompt_messages",
    "add_trajectory_step",
    "render_completion",
    "rubric",
    "oai_tools",
)

# What parsers of rubrics look for in a content stays there: reasoning too.
_TEMPLATE = {**TEMPLATE, "fields": {name: each for name, each in TEMPLATE["fields"].items() if name != "reasoning_content"}}


def from_verifiers(named: str, options: Mapping[str, Any]) -> Adapted:
    """options: arguments of `load_environment`. Raises EpisodeError for what is not there, ConfigError."""
    place, name, load_environment = located(named)
    if not callable(load_environment):
        raise ConfigError(f"environment {name!r} is a {type(load_environment).__name__}; a load_environment was expected")
    try:
        env = load_environment(**options)
    except Exception as error:  # the environment's own code
        raise ConfigError(f"environment {named} raised {type(error).__name__}: {error}") from error
    if lacking := [name for name in _NEEDED if not hasattr(env, name)]:
        raise ConfigError(
            f"environment {named} gave a {type(env).__name__}, which has no {lacking[0]!r}; a "
            "MultiTurnEnv of verifiers 0.1.9 was expected"
        )
    most = getattr(env, "max_turns", -1)
    tools = tuple(env.oai_tools or ())

    async def play(prompt: str | list[Message], seed: int, **columns: Any) -> AsyncGenerator[Any, str]:
        is_chat = env.message_type == "chat"
        row = {"example_id": 0, "answer": "", "info": {}, **{name: each for name, each in columns.items() if each is not None}}
        state = await env.init_state({**row, "prompt": as_messages(prompt) if is_chat else prompt}, None, "", {})
        unparsed = 0
        try:
            state = await env.setup_state(state) or state
            said: Any = [] if is_chat else ""
            while not await env.is_completed(state):
                messages = await env.get_prompt_messages(state)
                if state.get("final_env_response") is not None:
                    continue
                if messages[: len(said)] != said:
                    raise ValueError("it changes messages that the model has read; episodes only go on")
                turn = read_turn((yield messages[len(said) :]), tools if is_chat else (), _TEMPLATE)
                unparsed += turn.is_unparsed
                written = [_openai(turn.message, len(state["trajectory"]))] if is_chat else turn.message["content"]
                await env.add_trajectory_step(state, _step(messages, written, state["trajectory_id"]))
                said = messages + written
        finally:
            if not state["is_completed"]:  # Else it has been cleaned up.
                await env._cleanup(state)
        await env.render_completion(state)
        await env.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        yield Score(float(state["reward"]), metrics={**metrics, "unparsed_turns": unparsed})

    own_name = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return Adapted(play, Declaration(name=own_name, max_turns=most if most > 0 else MAX_TURNS), (), tools)


def _step(prompt: Any, completion: Any, trajectory_id: str) -> dict[str, Any]:
    """A `TrajectoryStep`. Tokens are not in it: the record has them."""
    return {
        "prompt": prompt,
        "completion": completion,
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": trajectory_id,
        "extras": {},
    }


def _openai(message: Message, turn: int) -> Message:
    """As a client of OpenAI's API gives it: calls have ids, and arguments as JSON text."""
    calls = [
        {
            "id": f"call_{turn}_{number}",
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    return {**message, "tool_calls": calls} if calls else message
