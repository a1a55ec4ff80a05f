"""An actor's end of the scorer: what the pool calls as it calls a dispatcher of its own (`scoring.dispatcher`).

owns        a DEALER socket and a thread; the tasks that are not answered yet
waits for   answers, what the pool says; beats once a second
woken by    the socket, and by `submit` and its like through a pipe
on close    nothing is waited for

A scorer that dies takes what it was asked with it, and one that hears nothing of an actor for long drops what that asked. Then
another life is named in answer to a beat: everything that is not answered is asked again, and counted (`asked_again`). A
scorer that is silent for too long answers nothing: its tasks fail with that reason.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from async_rlhf.actors.rewards import Answer
from async_rlhf.actors.scoring.executor import Answered, Shown
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
    answers,
    pack,
    unpack,
)
from async_rlhf.actors.scoring.reward_queue import Task
from async_rlhf.buffers.errors import DeadlineError, RewardError, WireError
from async_rlhf.buffers.transport.waker import Waker

_log = logging.getLogger(__name__)
_BEAT_MS = 1000
# The supervisor starts a dead scorer again within 30 s; its stages load their models meanwhile, and it answers beats.
_SILENT_S = 120.0


class ScorerClient:
    """See the module docstring. answered, shown: called by its thread, as the dispatcher's."""

    def __init__(self, address: str, answered: Answered, shown: Shown) -> None:
        self._address, self._answered, self._shown = address, answered, shown
        self._said: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, Ask] = {}
        self._life: str | None = None
        self.asked_again = 0
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._thread.start()

    def submit(self, name: str, task: Task) -> None:
        """See `Dispatcher.submit`."""
        members = [dict(member) for member in task.members]
        ask = Ask.model_construct(id=task.id, stage=name, members=members, tokens=task.tokens, stream=task.stream)
        self._do(partial(self._ask, ask))

    def show(self, stream: int, members: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Dispatcher.show`."""
        named = {name: dict(member) for name, member in members.items()}
        self._do(partial(self._show, Show.model_construct(stream=stream, members=named)))

    def forget(self, streams: Sequence[int]) -> None:
        """See `Dispatcher.forget`."""
        self._do(partial(self._send, Forget(streams=list(streams))))

    def discard(self, task_ids: Iterable[int]) -> None:
        """See `Dispatcher.discard`."""
        self._do(partial(self._discard, list(task_ids)))

    def check(self) -> None:
        """Raises RewardError when the thread has ended."""
        if not self._thread.is_alive():
            raise RewardError("the thread that speaks to the scorer process has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError when the thread is left after `deadline_s`."""
        self._closing = True
        self._waker.ring()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the thread that speaks to the scorer process did not end within {deadline_s:g} s")
        self._waker.close()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        self._socket = _dealer(context, self._address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        self._heard, beaten = time.monotonic(), 0.0
        try:
            while not self._closing:
                if time.monotonic() - beaten >= _BEAT_MS / 1000:
                    beaten = time.monotonic()
                    self._send(Beat())
                if self._waker.descriptor in dict(poller.poll(_BEAT_MS)):
                    self._waker.clear()
                for _ in range(self._said.qsize()):
                    self._said.get_nowait()()
                self._take_in()
                self._give_up()
        finally:
            self._socket.close()
            context.term()

    def _take_in(self) -> None:
        with suppress(zmq.Again):
            while True:
                message = unpack(self._socket.recv(zmq.NOBLOCK))
                self._heard = time.monotonic()
                if isinstance(message, Told):
                    if self._open.pop(message.id, None) is not None:
                        self._answered(message.id, answers(message.answers))
                elif isinstance(message, Read):
                    (answer,) = answers([message.answer])
                    self._shown(message.stage, tuple(message.streams), answer)
                elif isinstance(message, Alive) and message.life != self._life:
                    self._meet(message.life)

    def _meet(self, life: str) -> None:
        """The scorer remembers nothing from before this life, or it is the first."""
        if self._life is not None:
            self.asked_again += len(self._open)
            _log.warning("the scorer process does not know this actor any more: %d tasks are asked again", len(self._open))
        self._life = life
        for ask in list(self._open.values()):
            self._try(ask)

    def _ask(self, ask: Ask) -> None:
        if not self._open:
            self._heard = time.monotonic()  # nobody waited before
        self._open[ask.id] = ask
        if self._life is not None:
            self._try(ask)

    def _show(self, show: Show) -> None:
        if self._life is not None:
            with suppress(WireError):  # asking for the score says it
                self._send(show)

    def _try(self, ask: Ask) -> None:
        try:
            self._send(ask)
        except WireError as error:
            self._fail([ask.id], str(error))

    def _discard(self, task_ids: list[int]) -> None:
        for task_id in task_ids:
            self._open.pop(task_id, None)
        self._send(Discard(ids=task_ids))

    def _give_up(self) -> None:
        silent_s = time.monotonic() - self._heard
        if self._open and silent_s > _SILENT_S:
            self._fail(list(self._open), f"the scorer process was silent for {silent_s:.0f} s")

    def _fail(self, task_ids: Iterable[int], reason: str) -> None:
        for task_id in task_ids:
            del self._open[task_id]
            self._answered(task_id, (Answer(None, reason),))

    def _send(self, message: Message) -> None:
        self._socket.send_multipart([b"%d" % message.id if isinstance(message, Ask) else b"", pack(message)])

    def _do(self, what: Callable[[], None]) -> None:
        self._said.put(what)
        self._waker.ring()


def ask_alive(address: str, timeout_s: float) -> Alive:
    """What the scorer at this address says of itself. Raises DeadlineError when it says nothing."""
    with zmq.Context() as context, _dealer(context, address) as socket:
        socket.send_multipart([b"", pack(Beat())])
        if socket.poll(int(timeout_s * 1000)):
            message = unpack(socket.recv())
            assert isinstance(message, Alive), message
            return message
    raise DeadlineError(f"the scorer process did not answer within {timeout_s:g} s")


def _dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # the pool must not wait; what waits is bounded by what the engine decodes
    socket.connect(address)
    return socket
