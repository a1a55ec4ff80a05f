"""A relay's process: the real `RelayProxy` between actors, on a network of its own, and the hub."""

from __future__ import annotations

from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import Link
from async_rlhf.buffers.weights.relay import RelayProxy
from tests.simulation.hub_role import HubRole
from tests.simulation.world import Network, SimLink, ViolationError

TICK_S = 1.0


class RelayRole:
    """To its actors the hub: dies with all it holds and comes back knowing nothing."""

    def __init__(self, hub: HubRole) -> None:
        self._hub, self._world = hub, hub.world
        self.network = Network(hub.world, self._arrive)
        self._proxy: RelayProxy | None = None
        self._inbox: list[tuple[bytes, wire.Frames]] = []
        self._turn_due = False
        self._life = 0
        self.links: list[SimLink] = []

    def start(self) -> None:
        self._life += 1
        life = self._life
        self._hub.machine.begin("relay")
        with self._hub.machine.run("relay"):
            self._proxy = RelayProxy(self._hub.address, self._hub.weights, lambda name: self._open(name, life), self._close)
        self.network.was_wild = self._hub.network.was_wild
        self.network.listen()
        self._tick(life)

    def kill(self) -> None:
        if self._proxy is None:
            return
        self._world.note("relay killed")
        self._life += 1
        self._proxy = None
        self._inbox.clear()
        self._turn_due = False
        self._hub.machine.end("relay")
        for link in list(self.links):
            self._close(link)
        self.network.hang_up()
        self._world.after(self._world.rng.uniform(0.1, 1.0), "relay starts", self.start)

    def _open(self, name: str, life: int) -> Link:
        link = self._hub.network.connect(name, lambda: self._soon(life))
        self.links.append(link)
        return link

    def _close(self, link: Link) -> None:
        assert isinstance(link, SimLink)
        link.close()
        self.links.remove(link)

    def _arrive(self, identity: bytes, frames: wire.Frames) -> None:
        if self._proxy is not None:
            self._inbox.append((identity, frames))
            self._soon(self._life)

    def _soon(self, life: int) -> None:
        if life == self._life and not self._turn_due:
            self._turn_due = True
            self._world.after(self._world.rng.uniform(0, 0.002), "turn relay", lambda: self._turn(life))

    def _tick(self, life: int) -> None:
        if life == self._life and self._proxy is not None:
            self._proxy.tick()
            self._soon(life)
            self._world.after(TICK_S, "relay ticks", lambda: self._tick(life))

    def _turn(self, life: int) -> None:
        if life != self._life or self._proxy is None:
            return
        self._turn_due = False
        taken, self._inbox = self._inbox, []
        try:
            with self._hub.machine.run("relay"):
                for identity, frames in taken:
                    self._proxy.take(identity, frames, None)
                self._proxy.turn()
        except AsyncRLHFError as error:
            if not self._hub.network.was_wild:
                raise ViolationError("crash", f"the relay ended: {error!r}") from error
            self.kill()
            return
        sets = len(self._proxy._cache._weight_server.store._sets)
        if sets > 2:
            raise ViolationError("memory", f"the relay keeps {sets} weight sets")
        for message in self._proxy.outbox:
            self.network.deliver(message)
        self._proxy.outbox.clear()
        if self._proxy.has_work:
            self._soon(life)
