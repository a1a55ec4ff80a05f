"""An actor's end of the hub."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from buffers.clients.connection import Connection
from buffers.config import WeightsConfig
from buffers.errors import DeadlineError, RefusedError
from buffers.protocol import packing, wire
from buffers.record import Group
from buffers.transport.link import Connect, SocketLink
from buffers.weights.fetching import Fetching
from buffers.weights.weight_set import WeightSet

_MAX_REFUSED = 256  # refused puts that are remembered


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
