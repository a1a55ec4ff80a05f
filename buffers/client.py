"""The other ends of the hub: what an actor, the learner and the supervisor say, and what they do with the answers.

When the connection broke or the hub was restarted, what must be said again is decided here (an actor says Hello with what
it holds and repeats its unacknowledged puts) or by the caller (the learner registers anew when it gets HubRestartedError).
Every wait has a deadline and says for what it waited. One thread only; frames go over a `link`.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from buffers.config import WeightsConfig
from buffers.errors import DeadlineError, RefusedError
from buffers.protocol import packing, wire
from buffers.record import Group
from buffers.tensors import RawTensor
from buffers.transport.link import Connect, Link, SocketLink
from buffers.weights.fetching import Fetching
from buffers.weights.publishing import Publishing
from buffers.weights.weight_set import WeightSet

_RETRY_S = 2.0  # a request unanswered so long is sent again: the hub may have been restarted
_MAX_REFUSED = 256  # refused puts that are remembered
_UNREADABLE = 0  # the request number of an answer to what the hub could not read


class HubRestartedError(RefusedError):
    """The hub does not know this learner any more: register and publish again."""


class Connection:
    """Numbered messages over one link.

    Raises WireError for a message larger than the hub takes, DeadlineError when so much waits to be sent that no more fits.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._last_request = 0
        self.max_frame_bytes = wire.MAX_FRAME_BYTES  # until the hub says what it takes

    def send(self, message: wire.Message, arrays: wire.Frames | None = None) -> int:
        """Send without waiting for an answer; returns the request number that the answer will carry."""
        self._last_request += 1
        self._send(self._last_request, message, arrays)
        return self._last_request

    def receive(self, timeout_s: float) -> tuple[int, wire.Message, wire.Frames] | None:
        """The next message, or None after `timeout_s` or a wake."""
        frames = self.link.receive(timeout_s)
        return None if frames is None else wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)

    def ask(
        self, message: wire.Message, arrays: wire.Frames | None = None, *, timeout_s: float
    ) -> tuple[wire.Message, wire.Frames]:
        """Send and wait for the answer, repeating the request while the hub is away.

        A Waiting answer proves the hub alive and moves the deadline. Raises RefusedError, or DeadlineError naming what
        was asked.
        """
        self._last_request += 1
        heard = resend_at = self.link.clock()
        detail = "the hub never answered"
        while (now := self.link.clock()) - heard < timeout_s:
            if now >= resend_at:
                self._send(self._last_request, message, arrays)
                resend_at = now + _RETRY_S
            answer = self.receive(min(_RETRY_S, timeout_s))
            if answer is None or not self._is_answer(answer[0], answer[1]):
                continue
            heard = self.link.clock()
            resend_at = heard + _RETRY_S
            if isinstance(answer[1], wire.Waiting):
                detail = answer[1].detail
            else:
                _raise_refusal(answer[1])
                return answer[1], answer[2]
        raise DeadlineError(f"waited {timeout_s:.0f} s for the answer to {message.type!r}: {detail}")

    def ask_all(self, messages: Iterable[tuple[wire.Message, wire.Frames]], *, ahead: int, timeout_s: float) -> None:
        """Send many requests, up to `ahead` of them before the first is answered; returns when all are.

        What the answers say is dropped but for a refusal. Raises as `ask` does.
        """
        coming, open_requests = iter(messages), dict[int, tuple[wire.Message, wire.Frames]]()
        heard = resend_at = self.link.clock()
        while True:
            for message, arrays in itertools.islice(coming, ahead - len(open_requests)):
                open_requests[self.send(message, arrays)] = message, arrays
                resend_at = self.link.clock() + _RETRY_S
            if not open_requests:
                return
            answer = self.receive(min(_RETRY_S, timeout_s))
            now = self.link.clock()
            if answer is not None and (answer[0] in open_requests or answer[0] == _UNREADABLE):
                _raise_refusal(answer[1])
                if open_requests.pop(answer[0], None) is not None:
                    heard = now
            if now - heard >= timeout_s:
                raise DeadlineError(f"waited {timeout_s:.0f} s for the answers to {len(open_requests)} messages")
            if now >= resend_at:
                resend_at = now + _RETRY_S
                for request, (message, arrays) in open_requests.items():
                    self._send(request, message, arrays)

    def _is_answer(self, request: int, message: wire.Message) -> bool:
        """Whether this is about what was asked last; a request that the hub cannot read it refuses without its number."""
        return request == self._last_request or (request == _UNREADABLE and isinstance(message, wire.Refused))

    def _send(self, request: int, message: wire.Message, arrays: wire.Frames | None) -> None:
        frames = wire.encode(message, arrays, request)
        wire.check_size(frames, max_frame_bytes=self.max_frame_bytes)
        if not self.link.send(frames):
            raise DeadlineError(f"{message.type!r} cannot be sent: the hub has been away for too many messages")

    def close(self) -> None:
        self.link.close()


def _raise_refusal(answer: wire.Message) -> None:
    if isinstance(answer, wire.Refused):
        kind = HubRestartedError if answer.reason == "unregistered" else RefusedError
        raise kind(answer.reason, answer.detail)


@dataclass(frozen=True)
class ActorState:
    """What an actor tells the hub about itself."""

    capacity: int
    fence: int
    version: int
    holding: tuple[tuple[int, int], ...]


class ActorClient:
    """An actor's end: credits and weights in, groups out. Never blocks; `poll` does everything.

    Waits for nothing but the hub's messages. When the hub was restarted, or the connection to it was lost, it says Hello
    with everything the actor holds and repeats the puts that were not acknowledged. Between a Hello and its Welcome no
    credit counts: the hub gave it before it knew what the actor holds, and gives it to somebody again.
    Raises DeadlineError when the hub is silent for `timeout_s`, WireError for a group larger than the hub takes.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        beat_s: float,
        timeout_s: float,
        connect: Connect = SocketLink,
        weights: WeightsConfig | None = None,
    ) -> None:
        self._connection = Connection(connect(address, name))
        self._link = self._connection.link
        self._name, self._beat_s, self._timeout_s = name, beat_s, timeout_s
        self._said_hello = self._welcome = False
        self._hello_request = 0
        self._heard = self._beaten = self._link.clock()
        self._unacknowledged: dict[int, tuple[wire.Put, wire.Frames]] = {}
        self._later: dict[int, float] = {}  # when to put these again
        self._credits: list[wire.CreditItem] = []
        self._fetching = Fetching(self._connection.send, address, weights or WeightsConfig())
        self.stop_reason: str | None = None
        self.refused: deque[tuple[int, str]] = deque(maxlen=_MAX_REFUSED)  # newest puts the hub did not want, and why

    def poll(self, state: ActorState, telemetry: Mapping[str, float], timeout_s: float = 0.0) -> None:
        """Receive everything there is, waiting up to `timeout_s` for the first message or a `wake`; beat when it is time."""
        now = self._link.clock()
        self._fetching.serving = (state.fence, state.version)
        if self._link.was_remade() or not self._said_hello:
            self._hello(state)
        elif now - self._beaten >= self._beat_s:
            self.beat(state, telemetry)
        if now - self._heard > self._timeout_s:
            raise DeadlineError(f"{self._name} heard nothing from the hub for {self._timeout_s:.0f} s")
        if self._fetching.has_work:
            timeout_s = 0.0
        while (received := self._connection.receive(timeout_s)) is not None:
            timeout_s = 0.0
            self._heard = self._link.clock()
            self._handle(*received)
        self._fetching.advance()
        self._put_again()

    def wake(self) -> None:
        """End a waiting `poll`; may be called from any thread."""
        self._link.wake()

    def beat(self, state: ActorState, telemetry: Mapping[str, float]) -> None:
        """Tell the hub the actor's state now (new version, new capacity) rather than at the next beat."""
        self._beaten = self._link.clock()
        beat = wire.Beat(capacity=state.capacity, fence=state.fence, version=state.version, telemetry=dict(telemetry))
        self._connection.send(beat)

    def put(self, group: Group, *, constant: bool = False) -> None:
        """Send a group; it is kept and repeated until the hub says what became of it. constant: as in `wire.Put`."""
        header, arrays = packing.pack_group(group)
        self._unacknowledged[group.number] = (wire.Put(group=header, constant=constant), arrays)
        self._connection.send(self._unacknowledged[group.number][0], arrays)

    def release(self, numbers: Sequence[int]) -> None:
        """Give groups up that cannot keep the bound any more."""
        self._connection.send(wire.Release(numbers=list(numbers)))

    def credits(self) -> list[wire.CreditItem]:
        """The credits that came since the last call."""
        credits, self._credits = self._credits, []
        return credits

    def weights(self) -> WeightSet | None:
        """The newest whole, verified weight set, once."""
        return self._fetching.take()

    @property
    def unacknowledged(self) -> list[tuple[int, int]]:
        return [(number, put.group.attempt) for number, (put, _) in self._unacknowledged.items()]

    def close(self) -> None:
        with suppress(DeadlineError):
            self._connection.send(wire.Bye())
        self._connection.close()

    def _hello(self, state: ActorState) -> None:
        self._said_hello, self._welcome = True, False
        self._beaten = self._link.clock()
        self._fetching.reset()
        self._credits.clear()
        self._later.clear()  # it is said again below
        holding = sorted({*state.holding, *self.unacknowledged})
        self._hello_request = self._connection.send(
            wire.Hello(actor=self._name, capacity=state.capacity, fence=state.fence, version=state.version, holding=holding)
        )
        for put, arrays in self._unacknowledged.values():
            self._connection.send(put, arrays)

    def _put_again(self) -> None:
        """What there was no room for, when its time has come."""
        now = self._link.clock()
        for number in [number for number, at in self._later.items() if now >= at]:
            del self._later[number]
            if number in self._unacknowledged:
                self._connection.send(*self._unacknowledged[number])

    def _answered(self, number: int, attempt: int) -> None:
        waiting = self._unacknowledged.get(number)
        if waiting is not None and waiting[0].group.attempt == attempt:
            del self._unacknowledged[number]

    def _handle(self, request: int, message: wire.Message, arrays: wire.Frames) -> None:
        match message:
            case wire.Welcome(max_frame_bytes=limit):
                self._welcome = request == self._hello_request
                self._connection.max_frame_bytes = limit
            case wire.Credits(credits=credits):
                if self._welcome:
                    self._credits += credits
            case wire.Ack(groups=groups):
                for number, attempt in groups:
                    self._answered(number, attempt)
            case wire.Rejected(number=number, attempt=attempt, reason=reason):
                self._answered(number, attempt)
                self.refused.append((number, reason))
            case wire.Later(number=number, wait_s=wait_s):
                self._later[number] = self._link.clock() + wait_s
            case wire.Adopt(fence=fence, version=version):
                self._fetching.adopt((fence, version))
            case wire.Manifest() | wire.Chunk():
                self._fetching.hear(message, arrays)
            case wire.Stop(reason=reason):
                self.stop_reason = reason
            case wire.Refused(reason="unknown-actor"):
                if request > self._hello_request:  # else it was sent before the last Hello
                    self._said_hello = False
            case wire.Refused(reason="weights"):
                self._fetching.refused(request)
            case wire.Refused(reason=reason, detail=detail):
                raise RefusedError(reason, detail)
            case _:
                pass  # Done says only that the hub lives; parts of superseded sets are dropped


@dataclass(frozen=True)
class TakenBatch:
    """One batch of groups, with the actors' counters at that moment."""

    step: int
    groups: tuple[Group, ...]
    telemetry: Mapping[str, float]


class LearnerClient:
    """The learner's end: take batches, say what was trained and what is durable, publish weights. Blocks, with deadlines.

    Raises HubRestartedError when the hub lost its memory of this learner: `register` and `publish` again. Raises RefusedError
    with the reason `fenced` when another learner has taken its place, which is for good.
    """

    def __init__(
        self, address: str, *, timeout_s: float, connect: Connect = SocketLink, weights: WeightsConfig | None = None
    ) -> None:
        self._connection = Connection(connect(address, "learner"))
        self._publishing = Publishing(self._connection, address, weights or WeightsConfig(), timeout_s)
        self._timeout_s = timeout_s
        self._life = secrets.token_hex(8)
        self.fence = 0

    def register(self, step: int, committed: int) -> None:
        """(Re)start at `step`, the newest durable checkpoint being of `committed` steps; a new fence holds from now on."""
        register = wire.Register(step=step, committed=committed, learner=self._life, fence=self.fence)
        answer, _ = self._connection.ask(register, timeout_s=self._timeout_s)
        assert isinstance(answer, wire.Registered)
        self.fence = answer.fence

    def take(self, step: int, aim: int | None = None) -> TakenBatch | str:
        """Batch `step`, or the reason why none will come. Waits as long as the hub says that it is coming."""
        taken = self._take(step, aim)
        if isinstance(taken, str):
            return taken
        batch, frames = taken
        groups = tuple(packing.decode_put(frames[i : i + 3]) for i in range(0, len(frames), 3))
        return TakenBatch(step, groups, batch.telemetry)

    def take_packed(self, step: int) -> wire.Frames | str:
        """As `take`, but the groups as they came: three frames each, header and arrays of its Put."""
        taken = self._take(step)
        return taken if isinstance(taken, str) else taken[1]

    def _take(self, step: int, aim: int | None = None) -> tuple[wire.Batch, wire.Frames] | str:
        answer, frames = self._connection.ask(wire.Take(fence=self.fence, step=step, aim=aim), timeout_s=self._timeout_s)
        if isinstance(answer, wire.Ended):
            return answer.reason
        assert isinstance(answer, wire.Batch)
        return answer, frames

    def trained(self, step: int) -> None:
        """Batch `step` has been trained on. Does not wait: should it be lost, what is asked next says it too."""
        self._connection.send(wire.Trained(fence=self.fence, step=step))

    def commit(self, step: int) -> None:
        """A checkpoint of `step` steps is durable; everything before it may be deleted."""
        self._connection.ask(wire.Commit(fence=self.fence, step=step), timeout_s=self._timeout_s)

    def publish(self, version: int, tensors: Mapping[str, RawTensor], canary: wire.Canary | None = None) -> None:
        """Send a weight set; returns when the hub has verified it whole. Raises RefusedError when it is not."""
        self._publishing.publish(self.fence, version, tensors, canary)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def control(address: str, timeout_s: float = 5.0, connect: Connect = SocketLink) -> Iterator[Control]:
    """A short-lived connection for an operator's questions."""
    connection = Connection(connect(address, "control"))
    try:
        yield Control(connection, timeout_s)
    finally:
        connection.close()


class Control:
    """The supervisor's and the operator's end. Every method raises DeadlineError when no hub answers."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s

    def status(self) -> dict[str, Any]:
        answer, _ = self._connection.ask(wire.GetStatus(), timeout_s=self._timeout_s)
        assert isinstance(answer, wire.Status)
        return answer.status

    def drain(self) -> None:
        """No new credits; the learner is told when no batch can be completed any more."""
        self._connection.ask(wire.Drain(), timeout_s=self._timeout_s)

    def gone(self, actor: str) -> None:
        """This actor's process has ended."""
        self._connection.ask(wire.Gone(actor=actor), timeout_s=self._timeout_s)

    def halt(self) -> None:
        """The hub writes its ledger and exits."""
        self._connection.ask(wire.Halt(), timeout_s=self._timeout_s)
