"""The scorer: the stages of scoring that a machine runs once for all its actors.

owns        a ROUTER socket, a dispatcher with the stages' processes; no state that anybody would miss
waits for   requests of actors, answers of stages; looks round twice a second
woken by    the socket, and by the dispatcher through a pipe
on close    the processes are killed; who waits for an answer asks its next life again

Lanes are here, so completions of several actors share a batch, and limits are those of the machine. What an actor asked that
has fallen silent is dropped; should it be heard again, it learns that and asks again. It listens on a private ipc socket.
"""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardSpec
from async_rlhf.actors.scoring.dispatcher import Dispatcher
from async_rlhf.actors.scoring.executor import Answers
from async_rlhf.actors.scoring.messages import (
    MAX_BYTES,
    Alive,
    Ask,
    Beat,
    Discard,
    Forget,
    Message,
    Read,
    Show,
    Told,
    pack,
    said,
    unpack,
)
from async_rlhf.actors.scoring.pool import STREAM
from async_rlhf.actors.scoring.reward_queue import Task
from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.transport.waker import Waker

_log = logging.getLogger(__name__)
_LOOK_MS = 500
# An actor beats every second; one that is silent for so long is gone.
_SILENT_S = 30.0
# Numbers that actors give count up from 0; here each actor's have a range of their own.
_RANGE = 1 << 40


@dataclass
class _Actor:
    """Who asks. asked: by number here, the stream of what is not answered; shown: streams that nothing was asked of yet."""

    peer: bytes
    offset: int
    heard: float
    asked: dict[int, int | None] = field(default_factory=dict)
    shown: set[int] = field(default_factory=set)


class Scorer:
    """See the module docstring. `run` serves until `stop`; raises RewardError when a stage's processes do not come up."""

    def __init__(self, specs: Sequence[RewardSpec], config: ScoringConfig, address: str, silent_s: float = _SILENT_S) -> None:
        """silent_s: an actor that says nothing for so long is gone."""
        self._silent_s = silent_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # an answer may not be dropped; what waits is bounded by what was asked
        self._socket.bind(address)
        self._actors: dict[bytes, _Actor] = {}
        self._by_offset: dict[int, _Actor] = {}
        self._num_met = 0
        self._num_answered = 0
        self._life = uuid.uuid4().hex
        self._stopped = False
        self._events: queue.SimpleQueue[partial[None]] = queue.SimpleQueue()
        self._waker = Waker()
        self._dispatcher = Dispatcher(specs, config, self._answered, self._shown)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        try:
            while not self._stopped:
                if self._waker.descriptor in dict(poller.poll(_LOOK_MS)):
                    self._waker.clear()
                self._dispatcher.check()
                self._take_in()
                for _ in range(self._events.qsize()):
                    self._events.get_nowait()()
                self._drop_the_silent()
        finally:
            self._dispatcher.close(5.0)
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """End `run`; may be called from another thread."""
        self._stopped = True
        self._waker.ring()

    def _take_in(self) -> None:
        with suppress(zmq.Again):
            while True:
                peer, number, data = self._socket.recv_multipart(zmq.NOBLOCK)
                actor = self._meet(peer)
                try:
                    self._hear(actor, unpack(data))
                except WireError as error:
                    _log.warning("refused: %s", error)
                    if number:
                        self._send(actor, Told(id=int(number), answers=[said(Answer(None, str(error)))]))

    def _meet(self, peer: bytes) -> _Actor:
        if peer not in self._actors:
            actor = self._actors[peer] = _Actor(peer, self._num_met, time.monotonic())
            self._by_offset[self._num_met] = actor
            self._num_met += 1
        self._actors[peer].heard = time.monotonic()
        return self._actors[peer]

    def _hear(self, actor: _Actor, message: Message) -> None:
        base = actor.offset * _RANGE
        if isinstance(message, Ask):
            self._ask(actor, message)
        elif isinstance(message, Show):
            stream = base + message.stream
            actor.shown.add(stream)
            self._dispatcher.show(stream, {name: {**member, STREAM: stream} for name, member in message.members.items()})
        elif isinstance(message, Forget):
            self._dispatcher.forget([base + stream for stream in message.streams])
            actor.shown -= {base + stream for stream in message.streams}
        elif isinstance(message, Discard):
            self._dispatcher.discard([base + number for number in message.ids])
            for number in message.ids:
                actor.asked.pop(base + number, None)
        elif isinstance(message, Beat):
            waiting = sum(len(each.asked) for each in self._actors.values())
            # One that was dropped is met anew: for it this is another life, in which it asks again.
            life = f"{self._life}.{actor.offset}"
            self._send(actor, Alive(life=life, answered=self._num_answered, waiting=waiting))

    def _ask(self, actor: _Actor, ask: Ask) -> None:
        base = actor.offset * _RANGE
        number, stream = base + ask.id, None if ask.stream is None else base + ask.stream
        if number in actor.asked:
            return  # asked again because it could not know that this was heard
        actor.asked[number] = stream
        actor.shown.discard(-1 if stream is None else stream)
        members = tuple({**member, STREAM: stream} if STREAM in member else member for member in ask.members)
        self._dispatcher.submit(ask.stage, Task(number, members, ask.tokens, stream=stream))

    def _answered(self, number: int, found: Answers) -> None:
        """Called from the dispatcher's thread."""
        self._events.put(partial(self._tell, number, found))
        self._waker.ring()

    def _tell(self, number: int, found: Answers) -> None:
        offset, own = divmod(number, _RANGE)
        actor = self._by_offset.get(offset)
        if actor is not None and number in actor.asked:  # else nobody waits for it any more
            del actor.asked[number]
            self._num_answered += 1
            self._send(actor, Told(id=own, answers=[said(answer) for answer in found]))

    def _shown(self, stage: str, streams: tuple[int, ...], answer: Answer) -> None:
        """Called from the dispatcher's thread; nobody waits for this, so nobody is woken."""
        self._events.put(partial(self._tell_read, stage, streams, answer))

    def _tell_read(self, stage: str, streams: tuple[int, ...], answer: Answer) -> None:
        """Each actor is told of its own, with its share of the seconds."""
        by_offset: dict[int, list[int]] = {}
        for stream in streams:
            offset, own = divmod(stream, _RANGE)
            by_offset.setdefault(offset, []).append(own)
        for offset, own_streams in by_offset.items():
            if (actor := self._by_offset.get(offset)) is not None:
                seconds = answer.seconds * len(own_streams) / len(streams)
                part = answer._replace(ended=answer.began + seconds)
                self._send(actor, Read(stage=stage, streams=own_streams, answer=said(part)))

    def _drop_the_silent(self) -> None:
        now = time.monotonic()
        for peer, actor in list(self._actors.items()):
            if now - actor.heard > self._silent_s:
                del self._actors[peer], self._by_offset[actor.offset]
                self._dispatcher.discard(actor.asked)
                streams = actor.shown | {stream for stream in actor.asked.values() if stream is not None}
                self._dispatcher.forget(sorted(streams))

    def _send(self, actor: _Actor, message: Message) -> None:
        self._socket.send_multipart([actor.peer, pack(message)])
