"""An environment served to actors, with keys also on other machines (`async-rlhf serve environment FILE:NAME`).

Beside its loop (`service`) it owns the pool of its episodes' processes. On close these are killed; clients begin their
episodes again elsewhere, or here when it is back. Limits are those of the server, but for the number of turns, which each run
bounds itself. A turn is played once, however often it is asked for: its answer is kept until the next one. The episodes of a
client that is silent, or that names them no longer, are closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.pool import Ended, EpisodePool, Event, Observation
from async_rlhf.actors.environments.remote import (
    BEAT_S,
    PLAYED,
    Beat,
    Describe,
    Description,
    Gone,
    Leave,
    Message,
    Step,
    Stepped,
)
from async_rlhf.actors.workers.service import Client, Service
from async_rlhf.buffers.errors import WireError

_SILENT_S = 6 * BEAT_S
# Episodes above it wait at their clients, who ask again.
_MAX_EPISODES = 10_000
_ANY_TURNS = 1 << 62

Key = tuple[bytes, int]
"""A client's name, and the number that it gave the episode."""


@dataclass
class _Episode:
    """answer: to `turn`, None while it is played."""

    turn: int = 0
    answer: Stepped | None = None


@dataclass
class _Client(Client):
    episodes: dict[int, _Episode] = field(default_factory=dict)


class EnvironmentServer(Service[_Client]):
    """See the module docstring."""

    num_frames = 1

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: EnvironmentConfig,
        address: str,
        key_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for an address it may not or cannot have."""
        super().__init__("an environment", address, key_dir, PLAYED, _SILENT_S, clock=clock)
        self._spec = spec
        self.counters = {"episodes": 0, "turns": 0, **self.counters}
        self._pool = EpisodePool[Key](replace(spec, max_turns=_ANY_TURNS), config, self.wake)

    @property
    def num_episodes(self) -> int:
        return sum(len(client.episodes) for client in self._clients.values())

    def _advance(self) -> None:
        """Raises EpisodeError when the processes of the environment do not come up."""
        for event in self._pool.poll():
            self._happened(event)

    def _close(self) -> None:
        self._pool.close()

    def _handle(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Describe):  # of a process that may never play
            self._send(peer, self._description())
            return
        client = self._clients.setdefault(peer, _Client(peer, 0.0))
        client.last_seen = self._clock()
        if isinstance(message, Step):
            self._step(peer, client, message)
        elif isinstance(message, Leave):
            self._leave(peer, client, [message.id])
        elif isinstance(message, Beat):
            self._leave(peer, client, client.episodes.keys() - set(message.open))
        else:
            raise WireError(f"what is no message of a client: {message.type}")

    def _step(self, peer: bytes, client: _Client, step: Step) -> None:
        key, episode = (peer, step.id), client.episodes.get(step.id)
        if episode is None and step.turn:
            self._send(peer, Gone(id=step.id, turn=step.turn))
        elif episode is None:
            if step.fields is None:
                raise WireError("an episode begins without fields")
            if self.num_episodes < _MAX_EPISODES:
                self.counters["episodes"] += 1
                client.episodes[step.id] = _Episode()
                self._pool.begin(key, self._spec.usable(step.fields))
        elif step.turn == episode.turn:  # asked again
            if episode.answer is not None:
                self._send(peer, episode.answer)
        elif step.turn == episode.turn + 1 and episode.answer is not None and episode.answer.content is not None:
            if step.text is None:
                raise WireError("a turn of an episode has no text")
            self.counters["turns"] += 1
            episode.turn, episode.answer = step.turn, None
            self._pool.reply(key, step.text)
        else:
            raise WireError(f"turn {step.turn} of an episode whose turn is {episode.turn}")

    def _happened(self, event: Event[Key]) -> None:
        peer, id = event.key
        client = self._clients.get(peer)
        if client is None or (episode := client.episodes.get(id)) is None:
            return
        if isinstance(event, Observation):
            episode.answer = Stepped(id=id, turn=episode.turn, content=event.content, score=event.score)
        elif isinstance(event, Ended) and event.score is None:
            episode.answer = Stepped(id=id, turn=episode.turn)
        elif isinstance(event, Ended) and event.score is not None:
            value, failure, metrics = event.score.value, event.score.failure, dict(event.score.metrics)
            episode.answer = Stepped(id=id, turn=episode.turn, scored=True, value=value, failure=failure, metrics=metrics)
        else:
            del client.episodes[id]
            self._send(peer, Gone(id=id, turn=episode.turn))
            return
        self._send(peer, episode.answer)

    def _leave(self, peer: bytes, client: _Client, ids: Iterable[int]) -> None:
        known = [id for id in ids if client.episodes.pop(id, None) is not None]
        self._pool.discard([(peer, id) for id in known])

    def _drop(self, client: _Client) -> None:
        self._leave(client.peer, client, list(client.episodes))

    def _description(self) -> Description:
        spec = self._spec
        return Description(
            name=spec.name,
            max_turns=spec.max_turns,
            timeout_s=spec.timeout_s,
            episode_timeout_s=spec.episode_timeout_s,
            at_limit=spec.at_limit,
            required=list(spec.required),
            fields=None if spec.fields is None else list(spec.fields),
            tools=[dict(tool) for tool in spec.tools],
            judges=spec.judges,
        )
