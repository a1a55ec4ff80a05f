"""Environments that a server plays (`server`, `async-rlhf serve environment`): `remote:tcp://HOST:PORT`.

The server's description of its environment (its columns, limits and tools) is requested before the run. An actor's pool then
plays its episodes there, without processes of its own. An episode that the server does not know, because it began anew or lost
the process that played it, is lost and begun again, once. What only the process that started the run has is played there the
same way, without a description.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from async_rlhf.actors.environments.loading import Adapted, EnvironmentSpec
from async_rlhf.actors.environments.settings import Call, EnvironmentDeclaration, Message, Reply
from async_rlhf.actors.environments.yields import EpisodeEnd, Read, fails, read_yield
from async_rlhf.actors.workers import CALLER
from async_rlhf.actors.workers.client import Failure, SessionClient, describe
from async_rlhf.actors.workers.messages import SERVED, EnvironmentFields, ReplyFields, SessionStep, Stepped, to_answers
from async_rlhf.actors.workers.sessions import Happened, StepResult
from async_rlhf.buffers.errors import ConfigError, DeadlineError, EpisodeError, WireError
from async_rlhf.buffers.score import Score

_DESCRIBE_S = 10.0
# The server ends a step in its own time; its answer has so long to arrive.
_TRAVEL_S = 10.0


def from_server(address: str, options: Mapping[str, Any]) -> Adapted:
    """The environment at this address. options: `keys`, a key directory, needed for a server on another machine; those of the
    calling process are its own.

    Raises EpisodeError when it does not answer, ConfigError for other options.
    """
    if address.startswith(CALLER):
        return Adapted(_remote, EnvironmentDeclaration())
    if unknown := options.keys() - {"keys"}:
        raise ConfigError(f"environment.options.{min(unknown)}: a remote environment takes keys; others are its server's")
    served = _described(address, str(options.get("keys", "")))
    settings = EnvironmentDeclaration(**served.model_dump(exclude={"required", "fields", "tools", "judges"}))
    fields = None if served.fields is None else tuple(served.fields)
    return Adapted(_remote, settings, tuple(served.required), tuple(served.tools), served.judges, fields)


async def _remote(**fields: Any) -> Any:
    raise EpisodeError("a remote environment runs at its server only")
    yield


def _described(address: str, keys: str) -> EnvironmentFields:
    try:
        served = describe(address, _DESCRIBE_S, keys, SERVED).environment
    except DeadlineError as error:
        keyed = "" if keys else ", without keys (environment.options.keys)"
        raise EpisodeError(
            f"no environment answers at {address} within {_DESCRIBE_S:g} s{keyed}; is it served (async-rlhf serve environment "
            "FILE:NAME --address ...)?"
        ) from error
    except WireError as error:
        raise EpisodeError(str(error)) from error
    if served is None:
        raise EpisodeError(f"{address} serves no environment")
    return served


@dataclass
class _RemoteEpisode:
    """turn: of the newest step, which began then (seconds since the epoch). ends_at: monotonic seconds."""

    key: Hashable
    ends_at: float
    turn: int = 0
    began: float = 0.0


class RemoteEpisodes:
    """`Sessions` of episodes at a server."""

    def __init__(self, spec: EnvironmentSpec, address: str, happened: Happened) -> None:
        self._spec, self._happened = spec, happened
        self._episodes: dict[int, _RemoteEpisode] = {}
        self._lost: set[Hashable] = set()
        keys = "" if address.startswith(CALLER) else str(spec.options.get("keys", ""))
        self._client = SessionClient(address, keys, SERVED, self._answered)

    def begin(self, id: int, key: Hashable, what: Mapping[str, Any], timeout_s: float) -> None:
        limit_s = self._spec.episode_timeout_s
        episode = _RemoteEpisode(key, float("inf") if limit_s is None else time.monotonic() + limit_s)
        self._client.do(partial(self._step, id, episode, SessionStep.model_construct(id=id, members=[{**what}])))

    def reply(self, id: int, sent: str | Reply) -> None:
        self._client.do(partial(self._reply, id, sent))

    def discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._client.do(partial(self._discard, ids, keys))

    def check(self) -> None:
        self._client.check()

    def close(self, deadline_s: float) -> None:
        self._client.do(lambda: self._client.leave(list(self._episodes)))
        self._client.close(deadline_s)

    # -- the client's thread -----------------------------------------------------------------------------------------

    def _step(self, id: int, episode: _RemoteEpisode, step: SessionStep) -> None:
        self._episodes[id] = episode
        episode.turn, episode.began = step.turn, time.time()
        # An agent's first call may wait for a harness that starts it; the server bounds what comes after that.
        step_s = float("inf") if self._spec.calls and not step.turn else self._spec.timeout_s + _TRAVEL_S
        limit_s = min(step_s, max(0.0, episode.ends_at - time.monotonic()))
        self._client.step(step, limit_s)

    def _reply(self, id: int, sent: str | Reply) -> None:
        if (episode := self._episodes.get(id)) is not None:
            text, reply = (sent, None) if isinstance(sent, str) else (sent.text, _fields(sent))
            self._step(id, episode, SessionStep(id=id, turn=episode.turn + 1, text=text, reply=reply))

    def _discard(self, ids: Collection[int], keys: Collection[Hashable]) -> None:
        self._lost.difference_update(keys)
        if known := [id for id in ids if self._episodes.pop(id, None) is not None]:
            self._client.leave(known)

    def _answered(self, id: int, answer: Stepped | Failure) -> None:
        episode, now = self._episodes.pop(id), time.time()
        is_lost = isinstance(answer, Failure) and answer.kind == "lost"
        if is_lost and episode.key not in self._lost:
            self._lost.add(episode.key)
            self._happened(id, None)
            return
        result = self._failed(episode, answer) if isinstance(answer, Failure) else self._result(episode, answer)
        if isinstance(result, Read):
            self._episodes[id] = episode
        elif isinstance(answer, Stepped) and answer.content is not None:
            self._client.leave([id])  # the server would go on
        self._happened(id, StepResult(id, result, episode.began, now, ends=isinstance(result, EpisodeEnd)))

    def _result(self, episode: _RemoteEpisode, step: Stepped) -> Read | EpisodeEnd:
        if step.content is None:
            return _ended(step)
        if episode.turn >= self._spec.max_turns:
            return EpisodeEnd("max_turns", None if step.score is None else Score(step.score))
        if self._spec.calls != (step.call is not None):
            return fails("not readable", "the server's environment is not the one this run was checked with")
        if step.call is None:
            return Read(step.content, step.score)
        call = Call(messages=cast("list[Message]", step.content), **dict(step.call))
        return read_yield(call, episode.turn, self._spec.max_turns, calls=True)

    def _failed(self, episode: _RemoteEpisode, failure: Failure) -> EpisodeEnd:
        if failure.kind == "late" and episode.ends_at <= time.monotonic():
            return fails("timed out", f"the episode took longer than {self._spec.episode_timeout_s:g} s (episode_timeout_s)")
        if failure.kind == "late":
            return fails("timed out", f"{failure.reason}: {self._spec.timeout_s:g} s (timeout_s)")
        return fails("lost" if failure.kind == "lost" else "died", failure.reason)


def _fields(reply: Reply) -> ReplyFields:
    return ReplyFields(finish_reason=reply.finish_reason, num_prompt=reply.num_prompt, num_tokens=reply.num_tokens)


def _ended(step: Stepped) -> EpisodeEnd:
    if not step.answers:
        return EpisodeEnd("returned") if step.turn else fails("no turn", "it ended before the model wrote anything")
    (answer,) = to_answers(step.answers)
    if answer.failure is not None:
        return EpisodeEnd("failed", answer.score(), "reported")
    return EpisodeEnd("scored", answer.score(), turn_scores=tuple(step.turn_scores))
