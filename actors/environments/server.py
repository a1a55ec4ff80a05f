"""An environment served to actors, with keys also on other machines (`async-rlhf serve environment FILE:NAME`).

owns        a ROUTER socket, the pool of its episodes' processes; nothing that a restart must keep
waits for   messages, key exchanges, and what the pool has; looks up twice a second
woken by    the socket, and by the pool
on close    the processes are killed; clients begin their episodes again elsewhere, or here when it is back

Limits are those of the server, but for the number of turns, which each run bounds itself. A turn is played once, however often
it is asked for: its answer is kept until the next one. The episodes of a client that is silent, or that names them no longer,
are closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.pool import Ended, EpisodePool, Event, Observation
from async_rlhf.actors.environments.remote import (
    BEAT_S,
    MAX_BYTES,
    Beat,
    Describe,
    Description,
    Gone,
    Leave,
    Message,
    Step,
    Stepped,
    pack,
    unpack,
)
from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.server import ServerSocket

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_SILENT_S = 6 * BEAT_S
_MAX_UNREAD = 1000
# Episodes above it wait at their clients, who ask again.
_MAX_EPISODES = 10_000
_ANY_TURNS = 1 << 62
# Refused handshakes are logged once in so many seconds.
_REPORT_S = 10.0

Key = tuple[bytes, int]
"""A client's name, and the number that it gave the episode."""


@dataclass
class _Episode:
    """answer: to `turn`, None while it is played."""

    turn: int = 0
    answer: Stepped | None = None


@dataclass
class _Client:
    """heard: monotonic time of its last message."""

    heard: float
    episodes: dict[int, _Episode] = field(default_factory=dict)


class EnvironmentServer:
    """See the module docstring. `run` serves until `stop`. Raises ConfigError for an address it may not or cannot have."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: EnvironmentConfig,
        address: str,
        key_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        local = address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:"))
        if key_dir is None and not local:
            raise ConfigError(
                f"address = {address!r}: without keys an environment is served on this machine only. Use tcp://127.0.0.1:PORT "
                "or an ipc:// path, or make keys (async-rlhf keys new DIR) and name them with --keys."
            )
        access = None if key_dir is None else keys.load_hub(key_dir)
        self._spec, self._clock = spec, clock
        self._clients: dict[bytes, _Client] = {}
        self._stopped = False
        self.counters = {"episodes": 0, "turns": 0, "refused": 0}
        try:
            self._socket = ServerSocket(
                address,
                access,
                max_part_bytes=MAX_BYTES,
                max_message_bytes=2 * MAX_BYTES,
                max_unread=_MAX_UNREAD,
                linger_ms=500,
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"address = {address!r} cannot be used: {error}") from error
        self.address = self._socket.address
        self._pool = EpisodePool[Key](replace(spec, max_turns=_ANY_TURNS), config, self._socket.wake)

    def run(self) -> None:
        """Serve until `stop`; raises EpisodeError when the processes of the environment do not come up."""
        looked = reported = self._clock()
        try:
            while not self._stopped:
                self._socket.wait(_LOOK_S)
                self._receive()
                for event in self._pool.poll():
                    self._heard(event)
                now = self._clock()
                if now - looked > _LOOK_S:
                    looked = now
                    self._drop_silent(now)
                    self._socket.cut_unfinished()
                if now - reported > _REPORT_S:
                    reported = now
                    self._socket.report()
        finally:
            self._pool.close()
            self._socket.close()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        self._stopped = True
        self._socket.wake()

    @property
    def num_episodes(self) -> int:
        return sum(len(client.episodes) for client in self._clients.values())

    def _receive(self) -> None:
        while (received := self._socket.receive()) is not None:
            peer, *frames = map(bytes, received[0])
            try:
                if len(frames) != 1:
                    raise WireError(f"what is no message: {len(frames)} frames, not 1")
                self._handle(peer, unpack(frames[0]))
            except WireError as error:
                self.counters["refused"] += 1
                _log.warning("refused: %s", error)

    def _handle(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Describe):  # of a process that may never play
            self._send(peer, self._description())
            return
        client = self._clients.setdefault(peer, _Client(0.0))
        client.heard = self._clock()
        if isinstance(message, Step):
            self._step(peer, client, message)
        elif isinstance(message, Leave):
            self._close(peer, client, [message.id])
        elif isinstance(message, Beat):
            self._close(peer, client, client.episodes.keys() - set(message.open))
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

    def _heard(self, event: Event[Key]) -> None:
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

    def _close(self, peer: bytes, client: _Client, ids: Iterable[int]) -> None:
        known = [id for id in ids if client.episodes.pop(id, None) is not None]
        self._pool.discard([(peer, id) for id in known])

    def _drop_silent(self, now: float) -> None:
        for peer, client in list(self._clients.items()):
            if now - client.heard > _SILENT_S:
                self._close(peer, client, list(client.episodes))
                del self._clients[peer]

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

    def _send(self, peer: bytes, message: Message) -> None:
        """Dropped where a client does not read: it asks again."""
        self._socket.send([[peer, pack(message)]])
