"""The hub's process: the real exchange, journal and weight store over a disk that fails; rounds, ticks, deaths, restarts.
It may stand still for longer than any lease, with what arrives waiting at its socket.

A full disk may end it (rarely) and keep it from starting until there is room; a fuse ends it in the middle of a disk operation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from async_rlhf.buffers.config import CurriculumConfig, Fsync, QueueConfig, WeightsConfig
from async_rlhf.buffers.curriculum import Order
from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.recovery import QuarantineFile
from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.stream import PromptStream
from async_rlhf.buffers.weights.store import WeightStore
from tests.simulation.disk import HubKilledError, MemoryDisk
from tests.simulation.ether import TIMEOUT_S, Ether
from tests.simulation.invariants import Observer
from tests.simulation.memory import Machine
from tests.simulation.world import Network, ViolationError, World

SPOOL = Path("/spool")
CURRICULUM = CurriculumConfig(reward="reward", new_share=0.3, hard_share=0.2)


@dataclass(frozen=True)
class Pace:
    """How long everybody waits for what, in seconds."""

    beat_s: float = 0.5
    tick_s: float = 0.5
    lease_s: float = 3.0
    timeout_s: float = 15.0
    progress_timeout_s: float = 6.0

    def times(self, factor: float) -> Pace:
        return Pace(*(factor * getattr(self, each.name) for each in fields(self)))


class HubRole:
    """The hub's process: rounds, ticks, deaths and restarts."""

    def __init__(
        self, world: World, bound: Bound, observer: Observer, *,
        max_attempts: int, segment_bytes: int, fsync: Fsync, machine: Machine, shares: bool,
        fed: bool = False, chosen: int = 0, pace: Pace = Pace(),
    ) -> None:  # fmt: skip
        """fed: prompts come while the run goes on, out of the spool. chosen: of so many (or those) a curriculum chooses."""
        self._fed, self._chosen, self._prompts, self.pace = fed, chosen, None, pace
        self.world, self.bound, self.observer, self.machine = world, bound, observer, machine
        self.address = "ipc://hub" if shares else "hub"
        self.weights = WeightsConfig(transport="auto" if shares else "chunks", device_timeout_s=TIMEOUT_S)
        self.ether: Ether | None = None
        self.disk = MemoryDisk(world.rng)
        self.network = Network(world, self.arrive)
        self._config = QueueConfig(
            max_staleness=bound.max_staleness, exact=bound.exact, window=bound.window, lease_s=pace.lease_s,
            progress_timeout_s=pace.progress_timeout_s, max_attempts=max_attempts, fsync=fsync,
        )  # fmt: skip
        self._segment_bytes = segment_bytes
        self._inbox: list[tuple[bytes, wire.Frames]] = []
        self.life = 0
        self._stands_until = 0.0
        self._round_due = False
        self._journal: Journal | None = None
        self.exchange: Exchange | None = None

    def start(self) -> None:
        self.life += 1
        self.machine.begin("hub")
        try:
            journal = Journal(Path("/hub/queue"), segment_bytes=self._segment_bytes, files=self.disk, fsync=self._config.fsync)
            weights = WeightStore(Path("/hub/weights") if self.bound.exact else None, self.disk)
            quarantined = journal.replay.state.quarantined
            quarantine = QuarantineFile(Path("/hub/quarantine.jsonl"), None, quarantined, self.disk)
            clock = lambda: self.world.now  # noqa: E731
            life = f"life {self.life}"
            bound, self._prompts = self._open_prompts()
            exchange = Exchange(
                self._config, bound, journal, weights, clock, life, self.weights, quarantine, prompts=self._prompts
            )
        except HubKilledError:
            self.kill()
            return
        except (AsyncRLHFError, OSError) as error:
            if not self.disk.full:
                raise ViolationError("restart", f"the hub cannot start: {error}") from error
            self._die()
            return
        self._journal, self.exchange = journal, exchange
        self.observer.hub_changed(exchange, journal)
        self.network.listen()
        self._tick(self.life)

    def _open_prompts(self) -> tuple[Bound, Prompts | None]:
        if not self._fed and not self._chosen:
            return self.bound, None
        own, spool, order = Path("/hub/data/spool"), None, None
        if self._fed:
            stream = PromptStream(own, files=self.disk)
            spool = Spool(SPOOL, own, stream, lambda lines: [line.decode() for line in lines], self.disk)
            bound = replace(self.bound, numbers=stream.num_numbers, coming=True)
        if self._chosen:
            order = Order(own.parent, CURRICULUM, files=self.disk)
            bound = replace(self.bound, numbers=order.num_numbers, coming=True)
        return bound, Prompts(spool, order, CURRICULUM, self._chosen)

    @property
    def places(self) -> list[int]:
        """What the curriculum has chosen, as it is on the disk."""
        self.disk.fuse = None  # a death that was planned and did not come
        order = Order(Path("/hub/data"), CURRICULUM, files=self.disk)
        return [order.place(number) for number in range(order.num_numbers)]

    def feed(self, name: str, first: int, num_rows: int) -> None:
        """A producer's file comes into the spool, whole and durable, with the rows of these numbers."""
        rows = (json.dumps({"prompt": "p", "n": number}) + "\n" for number in range(first, first + num_rows))
        self.disk.deposit(SPOOL / name, "".join(rows).encode())

    def take_back(self, number: int) -> None:
        """An operator wants a group out."""
        self.observer.taken_back.add(number)
        self.network.connect("operator").send(wire.encode(wire.Quarantine(number=number, reason="wrong"), request=1))

    def stand_still(self, seconds: float) -> None:
        self._stands_until = self.world.now + seconds

    def kill(self) -> None:
        """The machine stops; where nothing is promised for that (`off`), only the process."""
        self.world.note("hub killed")
        self._die()
        if self._config.fsync == "off":
            self.disk.fuse = None
            return
        self.disk.crash()

    def _die(self) -> None:
        self.life += 1
        self._journal = self.exchange = self._prompts = None
        self._inbox.clear()
        self._round_due, self._stands_until = False, 0.0
        self.machine.end("hub")
        self.network.hang_up()
        self.world.after(self.world.rng.uniform(0.1, 1.0), "hub starts", self.start)

    def arrive(self, identity: bytes, frames: wire.Frames) -> None:
        if self.exchange is not None:
            self._inbox.append((identity, frames))
            self._soon()

    def _soon(self) -> None:
        if not self._round_due:
            self._round_due = True
            life = self.life
            self.world.after(self.world.rng.uniform(0, 0.002), "round", lambda: self._alive(life, self._round))

    def _alive(self, life: int, action: Callable[[], None]) -> None:
        """Do it when the hub has not died since; a disk that fails or a fuse that burns down ends the hub."""
        if life != self.life or self.exchange is None:
            return
        if self.world.now < self._stands_until:
            self.world.after(self._stands_until - self.world.now, "the hub goes on", lambda: self._alive(life, action))
            return
        try:
            with self.machine.run("hub"):
                action()
        except HubKilledError:
            self.kill()
        except (AsyncRLHFError, OSError) as error:
            if not self.disk.full:
                raise ViolationError("crash", f"the hub ended: {error!r}") from error
            self.world.note("hub ended, the disk is full")
            try:
                cast(Journal, self._journal).close()
            except HubKilledError:
                self.kill()
                return
            except (AsyncRLHFError, OSError):
                pass
            self._die()

    def _round(self) -> None:
        assert self.exchange is not None and self._journal is not None
        self._round_due = False
        taken, self._inbox = self._inbox, []
        for identity, frames in taken:
            self.exchange.receive(identity, frames)
        is_busy = self.exchange.work()
        self._settle()
        if is_busy:
            self._soon()

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        if self.world.now < self._stands_until:
            self.world.after(self._stands_until - self.world.now, "tick", lambda: self._tick(life))
            return

        def tick() -> None:
            assert self.exchange is not None
            self.exchange.tick()
            if self._prompts is not None and self._prompts.spool is not None:
                self._prompts.spool.turn()
            self._settle()

        self._alive(life, tick)
        if life == self.life:
            self.world.after(self.pace.tick_s, "tick", lambda: self._tick(life))

    def _settle(self) -> None:
        exchange, journal = self.exchange, self._journal
        assert exchange is not None and journal is not None
        admission = exchange._admission
        entries = {**admission._queued, **{n: entry for batch in admission._batches.of.values() for n, entry in batch.items()}}
        kept = [group for groups, _ in exchange.outbox._put.values() for group in groups]
        acks = [(number, attempt, entries[number].oldest_version) for number, attempt in kept if number in entries]
        filtered = {number for number, _ in kept}.difference(entries, admission.order.quarantined)
        exchange.settle()
        if exchange._full:
            self.world.note("the disk is full")
        else:
            self.observer.acknowledged(acks)
            self.observer.filtered |= filtered
        for message in exchange.outbox.messages:
            self.network.deliver(message)
        exchange.outbox.messages.clear()
        self.observer.hub_changed(exchange, journal)
