"""Environments that a server plays (`server`, `async-rlhf serve environment`): `remote:tcp://HOST:PORT`.

The server's description of its environment (its columns, limits and tools) is requested before the run. An actor's pool then
plays its episodes there, without processes of its own. An episode that the server does not know, because it began anew or lost
the process that played it, is lost and begun again, once. What only the process that started the run has is played there the
same way, without a description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from async_rlhf.actors.environments.loading import Adapted, EnvironmentSpec
from async_rlhf.actors.environments.settings import Call, EnvironmentDeclaration, Feedback, Message, Reply
from async_rlhf.actors.environments.yields import EpisodeEnd, Read, no_turn, read_yield, unreadable
from async_rlhf.actors.workers import CALLER
from async_rlhf.actors.workers.client import describe
from async_rlhf.actors.workers.messages import SERVED, EnvironmentFields, ReplyFields, SessionStep, Stepped, to_answers
from async_rlhf.buffers.errors import ConfigError, DeadlineError, EpisodeError, WireError

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


class RemoteEpisodes:
    """The `RemoteKind` of episodes."""

    codec = SERVED
    timeout_setting = "timeout_s"

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec, self.whole_timeout_s = spec, spec.episode_timeout_s

    def begins(self, id: int, what: Mapping[str, Any]) -> Iterable[SessionStep]:
        return [SessionStep.model_construct(id=id, members=[{**what}])]

    def goes_on(self, id: int, turn: int, sent: str | Reply) -> SessionStep:
        if isinstance(sent, str):
            return SessionStep(id=id, turn=turn, text=sent)
        fields = ReplyFields(finish_reason=sent.finish_reason, num_prompt=sent.num_prompt, num_tokens=sent.num_tokens)
        return SessionStep(id=id, turn=turn, text=sent.text, reply=fields)

    def limit_s(self, step: SessionStep, timeout_s: float) -> float:
        # An agent's first call may wait for a harness that starts it; the server bounds what comes after that.
        return float("inf") if self._spec.calls and not step.turn else timeout_s + _TRAVEL_S

    def read(self, step: Stepped) -> Read | EpisodeEnd:
        if step.content is None:
            return _ended(step)
        if self._spec.calls != (step.call is not None):
            return unreadable("the server's environment is not the one this run was checked with")
        if step.call is None:
            return read_yield(Feedback(step.content, step.score), step.turn, self._spec.max_turns)
        call = Call(messages=cast("list[Message]", step.content), **dict(step.call))
        return read_yield(call, step.turn, self._spec.max_turns, calls=True)

    def ends(self, result: Read | EpisodeEnd) -> bool:
        return isinstance(result, EpisodeEnd)


def _ended(step: Stepped) -> EpisodeEnd:
    if not step.answers:
        return EpisodeEnd("returned") if step.turn else no_turn()
    (answer,) = to_answers(step.answers)
    if answer.failure is not None:
        return EpisodeEnd("failed", answer.score(), answer.failure)
    return EpisodeEnd("scored", answer.score(), turn_scores=tuple(step.turn_scores))
