"""The device channel of one simulated machine: groups of processes that broadcast, without torch.

Model, after what is measured in `buffers.device.group`. A broadcast ends when every process of its group has come to it. Where
one does not come, because it has ended, hangs or had no message, the learner waits for its deadline, or learns earlier that a
connection has ended; an engine may have the set by then, or not. What comes may be damaged. The hub puts each into its group,
with a rank of its own: else bytes of one epoch would be taken for those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from async_rlhf.buffers.protocol import broadcasts
from async_rlhf.buffers.weights.standby import Received, Target
from async_rlhf.buffers.weights.weight_set import WeightSet, content_digest
from tests.simulation.errand import Errand
from tests.simulation.world import ViolationError, World

TIMEOUT_S = 0.5

Epoch = tuple[str, int, int]
"""Where its processes meet, fence, number."""


def digested(weights: WeightSet) -> WeightSet:
    """With the digests that are taken on a device in place of the hub's."""
    digests = {name: xxhash.xxh3_128_hexdigest(b"device" + bytes(raw.data)) for name, raw in weights.tensors().items()}
    specs = tuple(spec.model_copy(update={"digest": digests[spec.name]}) for spec in weights.specs)
    return replace(weights, specs=specs, canary=None, memory=None)


@dataclass
class Group:
    """One epoch's processes. woken: the learner, while it waits."""

    size: int
    seats: dict[int, SimSeat] = field(default_factory=dict)
    sent: WeightSet | None = None
    has_ended: bool = False
    is_broken: bool = False
    woken: Callable[[], None] = lambda: None


class SimSeat:
    """An engine's part in one epoch (`async_rlhf.buffers.weights.standby.Seat`)."""

    def __init__(self, ether: Ether, group: Group, process: str, done: Received) -> None:
        self._ether, self._group, self.process, self.done = ether, group, process, done
        self.waits_for: Target | None = None
        self.is_gone = self.hangs = False

    def do(self, target: Target) -> None:
        def come() -> None:
            self.waits_for = target
            self._ether.look(self._group)

        self._ether.world.after(self._ether.latency(), f"{self.process} receives", come)

    def leave(self) -> None:
        self.is_gone = True

    @property
    def is_there(self) -> bool:
        return not (self.is_gone or self.hangs)


class Ether:
    """Owns the groups. damage: share of the sets that do not come as they were sent. late: called when a broadcast
    failed, with the processes that had come to it."""

    def __init__(self, world: World, damage: float, late: Callable[[list[str]], None]) -> None:
        self.world, self._damage, self._late = world, damage, late
        self._groups: dict[Epoch, Group] = {}
        self.num_received = self.num_damaged = 0

    def latency(self) -> float:
        return self.world.rng.uniform(0.0005, 0.02)

    def group(self, epoch: Epoch, size: int) -> Group:
        group = self._groups.setdefault(epoch, Group(size))
        if group.size != size:
            raise ViolationError("epoch", f"epoch {epoch} has {group.size} processes for one, {size} for another")
        return group

    def take_seat(self, process: str, message: broadcasts.Receive, done: Received) -> SimSeat:
        group = self.group((message.store, message.fence, message.epoch), message.size)
        seat, before = SimSeat(self, group, process, done), group.seats.get(message.rank)
        if before is not None:
            raise ViolationError("epoch", f"{process} and {before.process} have rank {message.rank} of one epoch")
        group.seats[message.rank] = seat
        return seat

    def look(self, group: Group) -> None:
        """Whether all have come to the broadcast."""
        sent, come = group.sent, [seat for seat in group.seats.values() if seat.is_there]
        if sent is None or group.has_ended or len(come) < group.size - 1:
            return
        if all(seat.waits_for == (sent.fence, sent.version) for seat in come):
            group.has_ended = True
            self._deliver(come, sent)
            self.world.after(self.latency(), "broadcast", lambda: group.woken())

    def give_up(self, group: Group) -> None:
        """The learner does not wait any longer; some may have the set all the same."""
        sent = group.sent
        assert sent is not None
        come = [seat for seat in group.seats.values() if seat.waits_for == (sent.fence, sent.version)]
        self._late([seat.process for seat in come])
        self._deliver([seat for seat in come if self.world.rng.random() < 0.5], sent)
        group.has_ended = True

    def ended(self, process: str) -> None:
        """A process is gone. Its group may see that at once, or never."""
        for group in self._groups.values():
            for seat in group.seats.values():
                if seat.process == process and not seat.is_gone:
                    seat.is_gone = True
                    group.is_broken |= self.world.rng.random() < 0.5
                    self.world.after(self.latency(), "a connection ended", lambda group=group: group.woken())

    def learner_ended(self, store: str) -> None:
        """So do its engines."""
        for epoch, group in self._groups.items():
            group.woken = lambda: None
            for seat in group.seats.values() if epoch[0] == store else ():
                if self.world.rng.random() < 0.5 and seat.is_there:
                    self.world.after(self.latency(), "a connection ended", lambda seat=seat: seat.is_gone or seat.done(None))

    def hang(self, process: str) -> None:
        """Whatever part the process has now, nothing comes of it any more."""
        for group in self._groups.values():
            for seat in group.seats.values():
                seat.hangs |= seat.process == process

    def _deliver(self, seats: list[SimSeat], sent: WeightSet) -> None:
        for seat in seats:
            blob = bytearray(sent.blob)
            if self.world.rng.random() < self._damage:
                self.num_damaged += 1
                blob[:4] = np.int32(-7).tobytes()
            self.num_received += 1
            come = digested(replace(sent, blob=bytes(blob)))
            action = lambda seat=seat, come=come: seat.is_there and seat.done(come)  # noqa: E731
            self.world.after(self.latency(), f"{seat.process} has received", action)


class SimBroadcaster:
    """The learner's end (`async_rlhf.buffers.clients.learner.Broadcaster`). errand: what broadcasts, which it pauses."""

    def __init__(self, ether: Ether, store: str, errand: Callable[[], Errand]) -> None:
        self._ether, self.store, self._errand = ether, store, errand
        self._ended: set[tuple[int, int]] = set()

    def send(self, epoch: tuple[int, int], size: int, weights: WeightSet) -> str | None:
        ether, errand = self._ether, self._errand()
        group, until = ether.group((self.store, *epoch), size), ether.world.now + TIMEOUT_S
        if epoch in self._ended:
            raise ViolationError("epoch", f"epoch {epoch} is over, and used again")
        group.sent, group.has_ended, group.woken = weights, False, errand.resume
        ether.world.after(TIMEOUT_S, "the broadcast's deadline", lambda: group.woken())
        ether.world.after(0, "broadcast begins", lambda: ether.look(group))
        while not (group.has_ended or group.is_broken) and ether.world.now < until:
            errand.pause()
        group.woken = lambda: None
        if group.has_ended:
            return content_digest(digested(weights).specs)
        self._ended.add(epoch)
        ether.give_up(group)
        return None

    def close(self) -> None: ...
