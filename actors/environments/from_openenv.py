"""Environments that a server of OpenEnv plays: `openenv:http://127.0.0.1:8000`, an episode each session of its `/ws`.

A turn is an action: JSON, or with `options.action` the text of that field. The columns and `seed` go to `reset`; the score is
the sum of the rewards. An action that the server does not take is answered with its reason, and counted (`invalid_actions`).
Source: OpenEnv 0.10, `openenv.core.env_server`. Its package is needed at the server only.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2
from websockets.asyncio.client import ClientConnection, connect

from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted
from async_rlhf.actors.environments.settings import Content, EnvironmentDeclaration, Message
from async_rlhf.actors.environments.yields import MAX_BYTES
from async_rlhf.buffers.errors import ConfigError, EpisodeError, did_you_mean
from async_rlhf.buffers.score import Score

_ANSWER_S, _STEP_S = 10.0, 60.0
_OPTIONS = ("action", "observation")


def from_openenv(address: str, options: Mapping[str, Any]) -> Adapted:
    """options: `action`, the field that a turn's text is; `observation`, the field that the model reads (else all, as JSON).

    Raises EpisodeError where no server answers, ConfigError for an option or field that there is not.
    """
    if unknown := options.keys() - {*_OPTIONS}:
        name = min(unknown)
        raise ConfigError(f"environment.options.{name}: OpenEnv has no such option; {did_you_mean(name, _OPTIONS)}")
    if urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"environment 'openenv:{address}' is no address; give openenv:http://HOST:PORT")
    try:
        schema = httpx2.get(f"{address}/schema", timeout=_ANSWER_S, trust_env=not _is_here(address)).raise_for_status().json()
        known = {side: schema[side].get("properties", {}) for side in _OPTIONS}
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EpisodeError(f"no server of OpenEnv answers at {address} within {_ANSWER_S:g} s: {error!r}") from error
    for side, name in options.items():
        if name not in known[side]:
            hint = did_you_mean(str(name), known[side])
            raise ConfigError(f"environment.options.{side}: {address} has no field {name!r}; {hint}")
    play = partial(_played, address, options.get("action"), options.get("observation"))
    return Adapted(play, EnvironmentDeclaration(name="openenv", max_turns=MAX_TURNS, timeout_s=_STEP_S))


async def _played(
    address: str, action: str | None, shown: str | None, /, prompt: str | list[Message], seed: int, **columns: Any
) -> AsyncGenerator[Content | Score, str]:
    url = f"ws{address.removeprefix('http').rstrip('/')}/ws"
    proxy: Literal[True] | None = None if _is_here(address) else True
    async with connect(url, proxy=proxy, open_timeout=_ANSWER_S, close_timeout=1.0, max_size=MAX_BYTES) as socket:
        result = await _asked(socket, "reset", {**columns, "seed": seed})
        seen, rewards, invalid = _text(result, shown), [result.get("reward")], 0
        read: Content = f"{prompt}\n{seen}" if isinstance(prompt, str) else [*prompt, {"role": "user", "content": seen}]
        while not result.get("done"):
            text = yield read
            try:
                result = await _asked(socket, "step", {action: text} if action else _object(text))
            except InvalidActionError as error:
                invalid, read = invalid + 1, f"Invalid action: {error}"
            else:
                read = _text(result, shown)
                rewards.append(result.get("reward"))
    known = [float(reward) for reward in rewards if reward is not None]
    yield Score(sum(known) if known else None, metrics={"invalid_actions": invalid})


class InvalidActionError(EpisodeError):
    """The model's: it reads the reason."""


async def _asked(socket: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The server's answer: `observation`, `reward`, `done`. Raises EpisodeError for the server's errors."""
    await socket.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await socket.recv())
    found: dict[str, Any] = answer["data"]
    if answer["type"] != "error":
        return found
    code, reason = found.get("code"), json.dumps(found.get("errors") or found.get("message"))[:1000]
    if kind == "step" and code == "VALIDATION_ERROR":
        raise InvalidActionError(reason)
    hint = "; start it with a larger max_concurrent_envs, or set engine.slots lower" if code == "CAPACITY_REACHED" else ""
    raise EpisodeError(f"OpenEnv's server answered {kind} by {code}: {reason}{hint}")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidActionError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidActionError("a JSON object was expected")
    return found


def _text(result: Mapping[str, Any], shown: str | None) -> str:
    """The text of an observation."""
    found = result["observation"] if shown is None else result["observation"].get(shown)
    return found if isinstance(found, str) else json.dumps(found)


def _is_here(address: str) -> bool:
    """Whether no proxy is asked for it."""
    return urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
