"""The scoring server: rewards and stages in one process for many clients.

    scorer          the stages that a machine runs once for all its actors, on a private ipc socket
    reward server   one reward for actors on any machine (`async-rlhf serve reward FILE:NAME`), with keys or on this machine

Beside its loop (`service`) it owns a dispatcher with the executors of its stages. Queues are here, so completions of several
clients share a batch, and limits are those of the server. The requests of a silent client are dropped; its next heartbeat is
answered with another life, and it sends them again.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec
from async_rlhf.actors.scoring.dispatcher import Dispatcher
from async_rlhf.actors.scoring.executor import Answers
from async_rlhf.actors.scoring.messages import (
    NUM_IDS,
    REWARDS,
    STAGES,
    DiscardRequests,
    ForgetStreams,
    Heartbeat,
    Message,
    PrefetchRequest,
    PrefetchResponse,
    ScoreRequest,
    ScoreResponse,
    ServerState,
    to_fields,
)
from async_rlhf.actors.scoring.pool import STREAM, RewardCounters, num_tokens, usable
from async_rlhf.actors.scoring.reward_queue import Task
from async_rlhf.actors.workers.service import Client, Service
from async_rlhf.buffers.errors import RewardError, WireError
from async_rlhf.buffers.protocol.codec import Codec

_BUSY_RETRY_S = 1.0


class Audience(NamedTuple):
    """Whom a server is for. max_pending: requests above it are refused as busy; None: bounded by what the actors decode.

    max_unsent: messages that wait for one client; 0: all, none is dropped. silent_s: after that a client is gone.
    """

    codec: Codec[Message]
    max_pending: int | None
    max_unsent: int
    silent_s: float = 30.0


SCORER = Audience(STAGES, None, 0)
REWARD_SERVER = Audience(REWARDS, 10_000, 1_000)


class _Pending(NamedTuple):
    stage: str
    stream: int | None


@dataclass
class _Client(Client):
    """offset: its number; `NUM_IDS` ids of its requests and streams begin there. pending: unanswered requests by task id.
    shown: streams without a request so far."""

    offset: int
    pending: dict[int, _Pending] = field(default_factory=dict)
    shown: set[int] = field(default_factory=set)


class ScoringServer(Service[_Client]):
    """See the module docstring."""

    num_frames = 2

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        address: str,
        audience: Audience = SCORER,
        key_dir: Path | None = None,
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        """functions: by reward, those that only this process has. Raises ConfigError."""
        super().__init__("a reward", address, key_dir, audience.codec, audience.silent_s, audience.max_unsent)
        self._specs, self._max_pending = {spec.name: spec for spec in specs}, audience.max_pending
        self._by_offset: dict[int, _Client] = {}
        self._deadlines: dict[int, float] = {}
        self._num_met, self._life = 0, uuid.uuid4().hex
        self._events: queue.SimpleQueue[partial[None]] = queue.SimpleQueue()
        self._rewards = {spec.name: RewardCounters() for spec in specs}
        self.counters = {"requested": 0, "answered": 0, **self.counters, "too_late": 0}
        self._dispatcher = Dispatcher(specs, config, self._answered, self._shown, functions=functions)

    def _advance(self) -> None:
        """Raises RewardError when the workers of a stage do not come up."""
        self._dispatcher.check()
        for _ in range(self._events.qsize()):
            self._events.get_nowait()()

    def _close(self) -> None:
        self._dispatcher.close(10.0)

    def _meet(self, peer: bytes) -> _Client:
        now = self._clock()
        if peer not in self._clients:
            self._clients[peer] = self._by_offset[self._num_met] = _Client(peer, now, self._num_met)
            self._num_met += 1
        client = self._clients[peer]
        client.last_seen = max(client.last_seen, now)
        return client

    def _refuse(self, peer: bytes, frames: list[bytes], reason: str) -> None:
        if len(frames) == 2 and frames[0].isdigit() and len(frames[0]) < len(str(NUM_IDS)):
            self._respond(peer, int(frames[0]), (Answer(None, reason),))

    def _handle(self, peer: bytes, message: Message) -> None:
        client = self._meet(peer)
        base = client.offset * NUM_IDS
        if isinstance(message, ScoreRequest):
            self._score(client, message)
        elif isinstance(message, PrefetchRequest):
            spec, stream = self._spec(message.stage), base + message.stream
            if not spec.stream_tokens:
                raise RewardError(f"stage {spec.name!r} has no incremental scoring")
            client.shown.add(stream)
            self._dispatcher.show(stream, {spec.name: usable(spec, {**message.member, STREAM: stream})})
        elif isinstance(message, ForgetStreams):
            streams = [base + stream for stream in message.streams]
            self._dispatcher.forget(streams)
            client.shown.difference_update(streams)
        elif isinstance(message, DiscardRequests):
            ids = [base + number for number in message.ids]
            self._dispatcher.discard(ids)
            for task_id in ids:
                client.pending.pop(task_id, None)
                self._deadlines.pop(task_id, None)
        elif isinstance(message, Heartbeat):
            waiting = sum(len(each.pending) for each in self._clients.values())
            # A client that was dropped has a new offset, so for it this is another life.
            life = f"{self._life}.{client.offset}"
            self._send(client.peer, ServerState(life=life, answered=self.counters["answered"], waiting=waiting))
        else:
            raise WireError(f"what is no message of a client: {message.type}")

    def _score(self, client: _Client, request: ScoreRequest) -> None:
        base, most = client.offset * NUM_IDS, self._max_pending
        task_id, stream = base + request.id, None if request.stream is None else base + request.stream
        if task_id in client.pending:
            return  # A resent request that had arrived the first time.
        self.counters["requested"] += 1
        spec = self._spec(request.stage)
        if most is not None and sum(len(each.pending) for each in self._clients.values()) >= most:
            busy = Answer(None, f"{most} completions wait already", retry_after_s=_BUSY_RETRY_S)
            self._respond(client.peer, request.id, (busy,))
            return
        shown = [{**member, STREAM: stream} if STREAM in member else member for member in request.members]
        try:
            tokens = request.tokens or (0 if spec.tokens_per_minute is None else sum(map(num_tokens, shown)))
        except TypeError as error:
            raise RewardError(f"a completion's tokens are no list: {error}") from error
        if request.timeout_s is not None:
            self._deadlines[task_id] = time.monotonic() + request.timeout_s
            client.last_seen = max(client.last_seen, self._deadlines[task_id])
        client.pending[task_id] = _Pending(spec.name, stream)
        client.shown.discard(-1 if stream is None else stream)
        members = tuple(usable(spec, member) for member in shown)
        self._dispatcher.submit(spec.name, Task(task_id, members, tokens, stream=stream))

    def _spec(self, stage: str) -> RewardSpec:
        """Raises RewardError for a stage that is not here."""
        if not stage and len(self._specs) == 1:
            return next(iter(self._specs.values()))
        if stage not in self._specs:
            raise RewardError(f"there is no stage {stage[:100]!r} here; there is: {', '.join(sorted(self._specs))}")
        return self._specs[stage]

    def _answered(self, task_id: int, answers: Answers) -> None:
        """Called from the dispatcher's thread."""
        self._events.put(partial(self._settle, task_id, answers))
        self.wake()

    def _settle(self, task_id: int, answers: Answers) -> None:
        offset, request_id = divmod(task_id, NUM_IDS)
        client = self._by_offset.get(offset)
        if client is None or task_id not in client.pending:
            return  # Discarded, or dropped with its client.
        stage = client.pending.pop(task_id).stage
        for answer in answers:
            self._rewards[stage].count(stage, answer)
        self._deadlines.pop(task_id, None)
        self.counters["answered"] += 1
        # Retries were made here.
        self._respond(client.peer, request_id, tuple(answer._replace(retry_after_s=None) for answer in answers))

    def _shown(self, stage: str, streams: tuple[int, ...], answer: Answer) -> None:
        """Called from the dispatcher's thread; not urgent, so it wakes nothing."""
        self._events.put(partial(self._respond_shown, stage, streams, answer))

    def _respond_shown(self, stage: str, streams: tuple[int, ...], answer: Answer) -> None:
        """To each client its own streams, with their share of the seconds."""
        by_offset: dict[int, list[int]] = {}
        for stream in streams:
            offset, own = divmod(stream, NUM_IDS)
            by_offset.setdefault(offset, []).append(own)
        for offset, own_streams in by_offset.items():
            if (client := self._by_offset.get(offset)) is not None:
                seconds = answer.seconds * len(own_streams) / len(streams)
                part = to_fields(answer._replace(ended=answer.began + seconds))
                self._send(client.peer, PrefetchResponse(stage=stage, streams=own_streams, answer=part))

    def _look(self, now: float) -> None:
        """Drop requests whose client waits no longer, and silent clients."""
        late = [task_id for task_id, deadline in self._deadlines.items() if deadline < now]
        if late:
            self._dispatcher.discard(late)
        for task_id in late:
            del self._deadlines[task_id]
            self._by_offset[task_id // NUM_IDS].pending.pop(task_id, None)
        self.counters["too_late"] += len(late)
        super()._look(now)

    def _drop(self, client: _Client) -> None:
        del self._by_offset[client.offset]
        self._dispatcher.discard(client.pending)
        streams = client.shown | {each.stream for each in client.pending.values() if each.stream is not None}
        self._dispatcher.forget(sorted(streams))

    def _respond(self, peer: bytes, request_id: int, answers: Answers) -> None:
        self._send(peer, ScoreResponse(id=request_id, answers=[to_fields(answer) for answer in answers]))
