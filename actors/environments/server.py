"""An environment served to actors, with keys also on other machines (`async-rlhf serve environment FILE:NAME`).

Beside its loop (`service`) it owns the pool of its episodes' processes. On close these are killed; clients begin their
episodes again elsewhere, or here when it is back. An episode has one answer on its way, so an agent's calls at the same time
are answered one after the other. Limits are those of the server, but for the number of turns, which each run
bounds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.pool import EpisodePool, Event
from async_rlhf.actors.environments.settings import EnvironmentFunction, Reply
from async_rlhf.actors.environments.yields import Read
from async_rlhf.actors.rewards import Answer
from async_rlhf.actors.workers.messages import CallFields, EnvironmentFields, SessionStep, Stepped, to_fields
from async_rlhf.actors.workers.service import ServedSession, ServiceClient, WorkerService
from async_rlhf.buffers.errors import WireError

ANY_TURNS = 1 << 62
"""A run bounds them itself."""


class ServedEpisodes(Protocol):
    """As of `EpisodePool`. wake: called from any thread when a poll may have something."""

    wake: Callable[[], None]

    def begin(self, key: int, fields: Mapping[str, Any]) -> None: ...

    def reply(self, key: int, sent: str | Reply) -> None: ...

    def poll(self) -> list[Event[int]]: ...

    def discard(self, keys: Iterable[int]) -> None: ...

    def close(self) -> None: ...


class EnvironmentServer(WorkerService):
    """See the module docstring."""

    what = "an environment"

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: EnvironmentConfig,
        address: str,
        key_dir: Path | None = None,
        function: EnvironmentFunction | None = None,
        *,
        pool: ServedEpisodes | None = None,
        **service: Any,
    ) -> None:
        """function: where only this process has it. pool: what plays; None: processes of its own. service: as of
        `WorkerService`. Raises ConfigError."""
        super().__init__(address, key_dir, **service)
        self._spec = spec
        unbounded = replace(spec, max_turns=ANY_TURNS, one_by_one=True)
        self._pool = EpisodePool[int](unbounded, config, function=function) if pool is None else pool
        self._pool.wake = self._wake

    def _advance(self) -> None:
        """Raises EpisodeError when the processes of the environment do not come up."""
        for event in self._pool.poll():
            self._answer(event.key, partial(self._stepped, event))

    def _close(self) -> None:
        self._pool.close()

    def _begin(self, client: ServiceClient, session: ServedSession, step: SessionStep) -> None:
        if len(step.members) != 1:
            raise WireError("an episode begins with its fields")
        self._pool.begin(client.key(step.id), step.members[0])

    def _go_on(self, client: ServiceClient, step: SessionStep) -> None:
        if step.text is None:
            raise WireError("a turn of an episode has no text")
        if self._spec.calls != (step.reply is not None):
            raise WireError(f"a turn of an episode {'without' if self._spec.calls else 'with'} what a call is answered by")
        before = client.sessions[step.id].answer
        conversation = 0 if before is None or before.call is None else before.call.conversation
        sent = step.text if step.reply is None else Reply(step.text, **dict(step.reply), conversation=conversation)
        self._pool.reply(client.key(step.id), sent)

    def _end(self, keys: Collection[int], streams: Collection[int]) -> None:
        self._pool.discard(keys)

    def _stepped(self, event: Event[int], client: ServiceClient, id: int, session: ServedSession) -> Stepped | None:
        if event.result is None:
            return None
        if isinstance(event.result, Read):
            read, call = event.result, event.result.call
            fields = None if call is None else CallFields(**{name: getattr(call, name) for name in CallFields.model_fields})
            return Stepped(id=id, turn=session.turn, content=read.content, score=read.score, call=fields)
        score, failure = event.result.score, event.result.failure
        answers = [] if score is None else [to_fields(Answer(score.value, failure, score.metrics))]
        return Stepped(id=id, turn=session.turn, answers=answers, turn_scores=[*event.result.turn_scores])

    def _environment(self) -> EnvironmentFields:
        return EnvironmentFields(**{name: getattr(self._spec, name) for name in EnvironmentFields.model_fields})
