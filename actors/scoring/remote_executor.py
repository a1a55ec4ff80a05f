"""The executor of stages that run in the scoring server of this machine: the client end of its protocol.

owns        a DEALER socket and a thread; the requests that are not answered yet
waits for   answers, and the calls of the dispatcher; sends a heartbeat once a second
woken by    the socket, and by `submit` and `discard` through a pipe
on close    nothing is waited for

Pending requests are lost when the server restarts, or when it has dropped a silent client. The next heartbeat is then answered
with another life, and everything unanswered is resent and counted (`num_resent`). Requests to a server that stays silent for
two minutes fail with that reason.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from async_rlhf.actors.rewards import Answer
from async_rlhf.actors.scoring.executor import Answered, Call, Shown
from async_rlhf.actors.scoring.messages import (
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
    frames_of,
    to_answers,
)
from async_rlhf.buffers.errors import DeadlineError, RewardError, WireError
from async_rlhf.buffers.transport.frames import Waker

_log = logging.getLogger(__name__)
_BEAT_MS = 1000
# The supervisor restarts a dead scorer within 30 s; while its stages load their models it answers heartbeats.
_SILENT_S = 120.0


class RemoteExecutor:
    """See the module docstring. Batches, limits, retries and the choice of what to prefetch are the server's."""

    def __init__(self, address: str, answered: Answered, shown: Shown) -> None:
        self._address, self._answered, self._shown = address, answered, shown
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending: dict[int, ScoreRequest] = {}
        self._life: str | None = None
        self.num_resent = 0
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="remote-scoring", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """A prefetch gets no answer of its own: the server reports what it has read (`shown`)."""
        if not call.prefetch:
            members = [dict(member) for member in call.members]
            request = ScoreRequest.model_construct(
                id=call.id, stage=call.name, members=members, tokens=call.tokens, stream=call.stream
            )
            self._do(partial(self._request, request))
            return
        if call.forgotten:
            self._do(partial(self._send, ForgetStreams(streams=list(call.forgotten))))
        for member in call.members:
            shown = PrefetchRequest.model_construct(stage=call.name, stream=call.stream or 0, member=dict(member))
            self._do(partial(self._prefetch, shown))

    def discard(self, call_ids: set[int]) -> None:
        self._do(partial(self._discard, sorted(call_ids)))

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RewardError("the client thread of the scorer process has ended; see the log for its error")

    def close(self, deadline_s: float) -> None:
        self._closing = True
        self._waker.ring()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"the client thread of the scorer process did not end within {deadline_s:g} s")
        self._waker.close()

    def _do(self, action: Callable[[], None]) -> None:
        self._actions.put(action)
        self._waker.ring()

    # -- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        self._socket = _dealer(context, self._address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        self._last_message, sent = time.monotonic(), 0.0
        try:
            while not self._closing:
                if time.monotonic() - sent >= _BEAT_MS / 1000:
                    sent = time.monotonic()
                    self._send(Heartbeat())
                if self._waker.descriptor in dict(poller.poll(_BEAT_MS)):
                    self._waker.clear()
                for _ in range(self._actions.qsize()):
                    self._actions.get_nowait()()
                self._receive()
                self._give_up()
        finally:
            self._socket.close()
            context.term()

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                message = STAGES.unpack(self._socket.recv(zmq.NOBLOCK))
                self._last_message = time.monotonic()
                if isinstance(message, ScoreResponse):
                    if self._pending.pop(message.id, None) is not None:
                        self._answered(message.id, to_answers(message.answers))
                elif isinstance(message, PrefetchResponse):
                    (answer,) = to_answers([message.answer])
                    self._shown(message.stage, tuple(message.streams), answer)
                elif isinstance(message, ServerState) and message.life != self._life:
                    self._resend(message.life)

    def _resend(self, life: str) -> None:
        """The server knows nothing of an earlier life, or this is the first."""
        if self._life is not None:
            self.num_resent += len(self._pending)
            _log.warning("the scorer process does not know this actor any more: %d requests are resent", len(self._pending))
        self._life = life
        for request in list(self._pending.values()):
            self._try(request)

    def _request(self, request: ScoreRequest) -> None:
        if not self._pending:
            self._last_message = time.monotonic()  # The server's silence counts from here.
        self._pending[request.id] = request
        if self._life is not None:
            self._try(request)

    def _prefetch(self, request: PrefetchRequest) -> None:
        if self._life is not None:
            with suppress(WireError):  # The request for the score fails with it.
                self._send(request)

    def _try(self, request: ScoreRequest) -> None:
        try:
            self._send(request)
        except WireError as error:
            self._fail([request.id], str(error))

    def _discard(self, call_ids: list[int]) -> None:
        self._send(DiscardRequests(ids=call_ids))
        self._fail([call_id for call_id in call_ids if call_id in self._pending], "discarded")

    def _give_up(self) -> None:
        silent_s = time.monotonic() - self._last_message
        if self._pending and silent_s > _SILENT_S:
            self._fail(list(self._pending), f"the scorer process was silent for {silent_s:.0f} s")

    def _fail(self, call_ids: Iterable[int], reason: str) -> None:
        for call_id in call_ids:
            del self._pending[call_id]
            self._answered(call_id, (Answer(None, reason),))

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(frames_of(message))


def server_state(address: str, timeout_s: float) -> ServerState:
    """The state of the scoring server at this address. Raises DeadlineError without an answer."""
    with zmq.Context() as context, _dealer(context, address) as socket:
        socket.send_multipart(frames_of(Heartbeat()))
        if socket.poll(int(timeout_s * 1000)):
            message = STAGES.unpack(socket.recv())
            assert isinstance(message, ServerState), message
            return message
    raise DeadlineError(f"the scorer process did not answer within {timeout_s:g} s")


def _dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, STAGES.max_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)  # `submit` must not wait; what is queued is bounded by what the engine decodes
    socket.connect(address)
    return socket
