"""An actor's end of the hub."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.protocol import broadcasts, packing, wire
from async_rlhf.buffers.protocol.broadcasts import EngineDevice
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.transport.link import Connect, Connection, Patience, SocketLink
from async_rlhf.buffers.weights.receiver import WeightReceiver
from async_rlhf.buffers.weights.standby import Standby, TakeSeat
from async_rlhf.buffers.weights.weight_set import WeightSet

_log = logging.getLogger(__name__)
_MAX_REFUSED = 256  # refused puts that are remembered
_CLAIMS = 10  # claims of a taken name, one a beat: the hub knows after three that an actor has ended


@dataclass(frozen=True)
class ActorState:
    """The state that an actor reports to the hub."""

    capacity: int
    fence: int
    version: int
    holding: tuple[tuple[int, int], ...]
    progress: tuple[tuple[int, int], ...] = ()
    """(number, amount) of each group: an amount that rises whenever something of the group was done."""


class ActorClient:
    """An actor's end: credits and weights in, groups out. Never blocks; `poll` does everything.

    Owns the connection and, after `keep_beating`, a thread that beats while the actor's own is busy elsewhere (an engine that
    loads weights); it sends the newest state that it was given, which proves life and no progress. Waits for nothing
    but the hub's messages. When the hub was restarted, or the connection to it was lost, it sends Hello with everything the
    actor holds and repeats the puts that were not acknowledged. Between a Hello and its Welcome no credit counts: the hub gave
    it before it knew what the actor holds, and gives it again. shared: digests of what the hub must have in common.
    Raises DeadlineError when nothing has come from the hub for `timeout_s` while messages were taken in, WireError for a group
    larger than the hub takes, RefusedError when the hub does not take this actor.
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
        shared: Mapping[str, str] = MappingProxyType({}),
        take_seat: TakeSeat | None = None,
        bits: tuple[str, str] = ("", ""),
    ) -> None:
        """bits: a digest of completions whose bits the engine promises, or empty, and why it does not."""

        self._connection = Connection(connect(address, name))
        self._link, weights = self._connection.link, weights or WeightsConfig()
        self._standby: Standby | None = None
        if take_seat is not None:
            self._standby = Standby(take_seat, self._link.clock, weights.device_timeout_s, self._link.wake)
        self._device = EngineDevice() if self._standby is not None else None  # as it was sent to the hub
        self._name, self._beat_s, self._timeout_s = name, beat_s, timeout_s
        self._life, self._shared, self._bits = secrets.token_hex(8), dict(shared), bits
        self._using = threading.RLock()  # of the connection: by the actor's thread, and by the one that beats
        self._closed = threading.Event()
        self._newest: tuple[ActorState, wire.Telemetry] | None = None
        self._hello_sent = self._welcome = False
        self._hello_request = 0
        self._hello_at = self._beaten = self._link.clock()
        self._num_claims = 0  # of the name, in a row, that were refused
        self._patience = Patience(self._link.clock, timeout_s)
        self._unacknowledged: dict[int, tuple[wire.Put, wire.Frames]] = {}
        self._later: dict[int, float] = {}  # when to put these again
        self._credits: list[wire.CreditItem] = []
        self._weight_receiver = WeightReceiver(self._connection.send, self._link.clock, address, weights, standby=self._standby)
        self.stop_reason: str | None = None
        self.refused: deque[tuple[int, str]] = deque(maxlen=_MAX_REFUSED)  # newest puts the hub did not want, and why

    def poll(self, state: ActorState, telemetry: wire.Telemetry, timeout_s: float = 0.0) -> None:
        """Receive all messages, waiting up to `timeout_s` for the first one or a `wake`; beat when it is time."""
        with self._using:
            now = self._link.clock()
            self._newest = state, telemetry
            self._weight_receiver.serving = (state.fence, state.version)
            before = self._device
            if self._standby is not None:
                self._device = self._standby.look()
            if self._link.was_remade() or (not self._hello_sent and now >= self._hello_at):
                self._hello(state)
            elif self._hello_sent and (now - self._beaten >= self._beat_s or self._device != before):
                self.beat(state, telemetry)
            if self._weight_receiver.has_work:
                timeout_s = 0.0
            while (received := self._connection.receive(timeout_s)) is not None:
                timeout_s = 0.0
                self._patience.reset()
                self._handle(*received)
            if self._link.is_receiving():
                self._patience.reset()
            if self._patience.is_over():
                raise DeadlineError(f"{self._name} received nothing from the hub for {self._timeout_s:.0f} s")
            self._weight_receiver.advance()
            self._put_again()

    def works_on(self, state: ActorState) -> None:
        """The state that beats carry until the next `poll`."""
        with self._using:
            self._newest = state, self._newest[1] if self._newest is not None else wire.Telemetry()

    def keep_beating(self) -> None:
        """Send beats in time from a thread of its own, until `close`."""
        threading.Thread(target=self._beat_on, name="beats", daemon=True).start()

    def _beat_on(self) -> None:
        while not self._closed.wait(self._beat_s):
            with self._using, suppress(DeadlineError):  # the actor's own thread will raise it
                late = self._link.clock() - self._beaten >= 1.5 * self._beat_s
                if late and self._hello_sent and self._newest is not None and not self._closed.is_set():
                    self.beat(*self._newest)

    def wake(self) -> None:
        """End a waiting `poll`; may be called from any thread."""
        self._link.wake()

    def beat(self, state: ActorState, telemetry: wire.Telemetry) -> None:
        """Send the actor's state now (new version, new capacity) rather than at the next beat."""
        with self._using:
            self._beaten, self._newest = self._link.clock(), (state, telemetry)
            self._connection.send(
                wire.Beat(
                    capacity=state.capacity,
                    fence=state.fence,
                    version=state.version,
                    device=self._device,
                    telemetry=telemetry,
                    progress=list(state.progress),
                )
            )

    def put(self, group: Group, *, constant: bool = False) -> None:
        """Send a group; it is kept and repeated until the hub has answered. constant: as in `wire.Put`."""
        header, arrays = packing.pack_group(group)
        with self._using:
            self._unacknowledged[group.number] = (wire.Put(group=header, constant=constant), arrays)
            self._connection.send(self._unacknowledged[group.number][0], arrays)

    def release(self, numbers: Sequence[int]) -> None:
        """Give up groups that cannot keep the bound any more."""
        with self._using:
            self._connection.send(wire.Release(numbers=list(numbers)))

    def credits(self) -> list[wire.CreditItem]:
        """The credits that came since the last call."""
        credits, self._credits = self._credits, []
        return credits

    def weights(self) -> WeightSet | None:
        """The newest whole, verified weight set, once."""
        return self._weight_receiver.take()

    @property
    def unacknowledged(self) -> list[tuple[int, int]]:
        return [(number, put.group.attempt) for number, (put, _) in self._unacknowledged.items()]

    def close(self) -> None:
        self._closed.set()
        if self._standby is not None:
            self._standby.close()
        with self._using:
            with suppress(DeadlineError):
                self._connection.send(wire.Bye())
            self._connection.close()

    def _hello(self, state: ActorState) -> None:
        self._hello_sent, self._welcome = True, False
        self._beaten = self._link.clock()
        self._weight_receiver.reset()
        self._credits.clear()
        self._later.clear()  # repeated below
        hello = wire.Hello(
            actor=self._name,
            life=self._life,
            shared=self._shared,
            bits=self._bits,
            capacity=state.capacity,
            fence=state.fence,
            version=state.version,
            device=self._device,
            holding=sorted({*state.holding, *self.unacknowledged}),
        )
        self._hello_request = self._connection.send(hello)
        for put, arrays in self._unacknowledged.values():
            self._connection.send(put, arrays)

    def _put_again(self) -> None:
        """Repeat the puts that the hub had no room for, once they are due."""
        now = self._link.clock()
        for number in [number for number, at in self._later.items() if now >= at]:
            del self._later[number]
            if number in self._unacknowledged:
                self._connection.send(*self._unacknowledged[number])

    def _claim_again(self, detail: str) -> None:
        """Another process holds the name at the hub, perhaps one that has ended: send Hello again for a while."""
        self._num_claims += 1
        if self._num_claims > _CLAIMS:
            raise RefusedError("name-taken", detail)
        self._hello_sent, self._hello_at = False, self._link.clock() + self._beat_s

    def _answered(self, number: int, attempt: int) -> None:
        waiting = self._unacknowledged.get(number)
        if waiting is not None and waiting[0].group.attempt == attempt:
            del self._unacknowledged[number]

    def _handle(self, request: int, message: wire.Message, arrays: wire.Frames) -> None:
        match message:
            case wire.Welcome(max_frame_bytes=limit):
                self._welcome = request == self._hello_request
                self._num_claims = 0
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
                _log.info("group %d, attempt %d, was refused: %s", number, attempt, reason)
            case wire.Later(number=number, wait_s=wait_s):
                self._later[number] = self._link.clock() + wait_s
            case wire.Adopt(fence=fence, version=version):
                self._weight_receiver.adopt((fence, version), message.digest, message.canary)
            case broadcasts.Receive() if self._standby is not None:
                self._standby.receive(message)
            case broadcasts.Broadcast() if self._standby is not None:
                self._standby.disband((message.fence, message.epoch))
            case wire.Manifest() | wire.Chunk():
                self._weight_receiver.receive(message, arrays)
            case wire.Stop(reason=reason):
                self.stop_reason = reason
            case wire.Refused(reason="unknown-actor"):
                if request > self._hello_request:  # else it was sent before the last Hello
                    self._hello_sent = False
            case wire.Refused(reason="name-taken", detail=detail):
                self._claim_again(detail)
            case wire.Refused(reason="weights"):
                self._weight_receiver.refused(request)
            case wire.Refused(reason=reason, detail=detail):
                raise RefusedError(reason, detail)
            case _:
                pass  # Done means only that the hub lives; parts of superseded sets are dropped
